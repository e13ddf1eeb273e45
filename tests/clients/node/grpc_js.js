// Exercises a server's service test.Wire with @grpc/grpc-js. usage: node grpc_js.js HOST:PORT [CERTIFICATE]
// Prints one line of JSON per check: {"name": ..., "found": ...}; the test compares.
'use strict';

const fs = require('node:fs');
const grpc = require('@grpc/grpc-js');

const same = (value) => value;
const SIZES = [0, 1, 16379, 65536, 1 << 20, 64 << 20];

function method(name, streaming) {
  return {
    path: `/test.Wire/${name}`,
    requestStream: streaming,
    responseStream: streaming,
    requestSerialize: same,
    requestDeserialize: same,
    responseSerialize: same,
    responseDeserialize: same,
  };
}

const UNARY = ['Echo', 'Fail', 'Hold', 'Metadata', 'Nothing'];
const STREAMS = ['Chat', 'Count', 'Sum', 'FailLate'];
const service = {};
for (const name of UNARY) service[name] = method(name, false);
for (const name of STREAMS) service[name] = method(name, true);

const Client = grpc.makeGenericClientConstructor(service, 'Wire');
const security = process.argv[3]
  ? grpc.credentials.createSsl(fs.readFileSync(process.argv[3]))
  : grpc.credentials.createInsecure();
const client = new Client(process.argv[2], security, {
  'grpc.max_receive_message_length': -1,
  'grpc.max_send_message_length': -1,
});

const inTime = (milliseconds) => ({ deadline: Date.now() + milliseconds });

function unary(name, message, metadata, options) {
  return new Promise((resolve) => {
    client[name](message, metadata || new grpc.Metadata(), options || inTime(90000), (error, answer) =>
      resolve(error ? { code: error.code, details: error.details } : answer));
  });
}

function stream(name, messages) {
  return new Promise((resolve) => {
    const call = client[name](new grpc.Metadata(), inTime(90000));
    const answers = [];
    call.on('data', (answer) => answers.push(answer));
    call.on('error', () => {});
    call.on('status', (status) => resolve({ answers, code: status.code, details: status.details }));
    for (const message of messages) call.write(message);
    call.end();
  });
}

function print(name, found) {
  console.log(JSON.stringify({ name, found }));
}

async function main() {
  for (const size of SIZES) {
    const message = Buffer.alloc(size, 'abc');
    print(`unary ${size}`, message.equals(await unary('Echo', message)));
  }
  const many = await Promise.all([...Array(1000).keys()].map((number) => unary('Echo', Buffer.from(`${number}`))));
  print('many', many.every((answer, number) => answer.toString() === `${number}`));

  const messages = [...Array(1000).keys()].map((number) => Buffer.from(`message ${number}`));
  const chat = await stream('Chat', messages);
  print('chat', chat.code === 0 && chat.answers.every((answer, number) => answer.equals(messages[number])));
  print('count', (await stream('Count', [Buffer.from('1000 1000')])).answers.length);
  print('sum', (await stream('Sum', messages)).answers[0].toString());

  const metadata = new grpc.Metadata();
  metadata.set('x-text', 'a value');
  metadata.set('x-data-bin', Buffer.from([0, 1, 254, 255]));
  const seen = JSON.parse((await unary('Metadata', Buffer.alloc(0), metadata)).toString());
  print('metadata', [seen['x-text'], seen['x-data-bin']]);

  const failed = await unary('Fail', Buffer.from('5 100 % é漢\nend'));
  print('error', [failed.code, failed.details]);
  print('late', await stream('FailLate', [Buffer.from('one')]).then((ended) => [ended.answers.length, ended.code, ended.details]));
  print('unknown', (await unary('Nothing', Buffer.alloc(0))).code);
  print('deadline', (await unary('Hold', Buffer.alloc(0), null, inTime(100))).code);

  const cancelled = await new Promise((resolve) => {
    const call = client.Hold(Buffer.alloc(0), new grpc.Metadata(), inTime(90000), (error) => resolve(error.code));
    setTimeout(() => call.cancel(), 200);
  });
  print('cancelled', cancelled);

  const gzip = new Client(process.argv[2], security, { 'grpc.default_compression_algorithm': 2 });
  const long = Buffer.alloc(100000, 'compressible ');
  print('gzip', await new Promise((resolve) =>
    gzip.Echo(long, new grpc.Metadata(), inTime(90000), (error, answer) => resolve(!error && long.equals(answer)))));
  gzip.close();
  client.close();
}

main();
