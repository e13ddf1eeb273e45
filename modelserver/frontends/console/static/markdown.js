// The Markdown that language models write, as elements. Text stays text: nothing here is read as HTML.

import { copyButton, h } from "./core.js";

const INLINE = /(`+)(.+?)\1|\*\*(.+?)\*\*|__(.+?)__|\*([^\s*](?:[^*]*[^\s*])?)\*|\[([^\]]+)\]\((https?:\/\/[^\s)]+)\)/s;

function inline(text) {
  const found = [];
  for (let rest = text; rest;) {
    const match = INLINE.exec(rest);
    if (!match) return [...found, rest];
    if (match.index) found.push(rest.slice(0, match.index));
    const [whole, , code, bold, strong, emphasis, label, target] = match;
    if (code !== undefined) found.push(h("code", {}, code));
    else if (bold ?? strong) found.push(h("strong", {}, inline(bold ?? strong)));
    else if (emphasis) found.push(h("em", {}, inline(emphasis)));
    else found.push(h("a", { href: target, target: "_blank", rel: "noopener noreferrer" }, label));
    rest = rest.slice(match.index + whole.length);
  }
  return found;
}

const codeBlock = (language, text) => h("div", { class: "code-block" },
  h("div", { class: "row" }, h("small", {}, language), h("span", { class: "push" }), copyButton(text)), h("pre", { class: "code", tabindex: 0 }, text));

const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());

function table(head, rows) {
  return h("div", { class: "scroll", tabindex: 0 }, h("table", {}, h("thead", {}, h("tr", {}, cells(head).map((cell) => h("th", {}, inline(cell))))),
    h("tbody", {}, rows.map((row) => h("tr", {}, cells(row).map((cell) => h("td", {}, inline(cell))))))));
}

// Elements of a text, which may end anywhere: models are read while they write.
export function markdown(text) {
  const lines = text.split("\n"), found = [];
  const takeWhile = (test) => {
    const taken = [];
    while (lines.length && test(lines[0])) taken.push(lines.shift());
    return taken;
  };
  while (lines.length) {
    const line = lines[0];
    const fence = /^\s*(```+|~~~+)\s*([\w+#.-]*)/.exec(line);
    const heading = /^(#{1,6})\s+(.*)/.exec(line);
    if (!line.trim()) lines.shift();
    else if (fence) {
      lines.shift();
      const body = takeWhile((each) => !each.trim().startsWith(fence[1]));
      lines.shift();
      found.push(codeBlock(fence[2], body.join("\n")));
    } else if (heading) {
      lines.shift();
      found.push(h(heading[1].length < 3 ? "h3" : "h4", {}, inline(heading[2])));
    } else if (/^\s*([-*_])(\s*\1){2,}\s*$/.test(line)) {
      lines.shift();
      found.push(h("hr"));
    } else if (/^\s*>/.test(line)) {
      found.push(h("blockquote", {}, markdown(takeWhile((each) => /^\s*>/.test(each)).map((each) => each.replace(/^\s*> ?/, "")).join("\n"))));
    } else if (line.includes("|") && /^[\s|:-]+$/.test(lines[1] ?? "") && lines[1].includes("-")) {
      const [head] = lines.splice(0, 2);
      found.push(table(head, takeWhile((each) => each.includes("|"))));
    } else if (/^\s*([-*+]|\d+[.)])\s/.test(line)) {
      const isItem = (each) => /^\s*([-*+]|\d+[.)])\s/.test(each);
      const items = takeWhile((each) => isItem(each) || /^\s{2,}\S/.test(each));
      const texts = [];
      for (const item of items) {
        if (isItem(item)) texts.push(item.replace(/^\s*([-*+]|\d+[.)])\s+/, ""));
        else texts[texts.length - 1] += `\n${item.trim()}`;
      }
      found.push(h(/^\s*\d/.test(line) ? "ol" : "ul", {}, texts.map((item) => h("li", {}, inline(item)))));
    } else {
      const isPlain = (each) => each.trim() && !/^\s*(```|~~~|#{1,6}\s|>|[-*+]\s|\d+[.)]\s)/.test(each);
      const body = [lines.shift(), ...takeWhile(isPlain)];
      found.push(h("p", {}, inline(body.join("\n"))));
    }
  }
  return found;
}
