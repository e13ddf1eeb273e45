// Exercises REST over HTTP/2 with Node's own client. usage: node http2.js HOST:PORT
'use strict';

const http2 = require('node:http2');

const TABLES = [0, 100, 4096, 65536].map((headerTableSize) => ({ headerTableSize }));
const SETTINGS = [{}, ...TABLES, { initialWindowSize: 1 }, { initialWindowSize: 1 << 20 }];

function ask(session, method, path, body) {
  return new Promise((resolve, reject) => {
    const request = session.request({ ':method': method, ':path': path });
    let status;
    const pieces = [];
    request.on('response', (headers) => { status = headers[':status']; });
    request.on('data', (piece) => pieces.push(piece));
    request.on('end', () => resolve({ status, body: Buffer.concat(pieces) }));
    request.on('error', reject);
    request.end(body);
  });
}

async function exercise(settings) {
  const session = http2.connect(`http://${process.argv[2]}`, { settings });
  session.on('error', (error) => console.log(JSON.stringify({ settings, error: `${error}` })));
  const size = settings.initialWindowSize === 1 ? 50 : 300000;
  const body = Buffer.alloc(size, 'xyz');
  const many = await Promise.all([...Array(1000).keys()].map((number) => ask(session, 'POST', '/echo', `${number}`)));
  const echoes = await Promise.all([...Array(20)].map(() => ask(session, 'POST', '/echo', body)));
  const pieces = await ask(session, 'GET', `/pieces/10/${size / 10}`);
  const missing = await ask(session, 'GET', '/nowhere');
  await new Promise((resolve, reject) => session.ping((error) => (error ? reject(error) : resolve())));
  console.log(JSON.stringify({
    settings,
    many: many.every((answer, number) => answer.status === 200 && answer.body.toString() === `${number}`),
    echoed: echoes.every((answer) => answer.status === 200 && answer.body.equals(body)),
    pieces: pieces.body.length === size,
    missing: missing.status,
  }));
  await new Promise((resolve) => session.close(resolve));
}

(async () => {
  for (const settings of SETTINGS) await exercise(settings);
})();
