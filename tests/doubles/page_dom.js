/* Runs the script of a page against as much of a browser as it uses, and prints what a reader would
   find. The double has no way to make elements of text. Usage: node page_dom.js PAGE_SCRIPT < RUNS */
"use strict";
const fs = require("fs");

class Node {
  constructor(name, text = "") {
    Object.assign(this, { name, text, children: [], attributes: {}, style: {}, dataset: {}, heard: {} });
    this.classList = {
      toggle: (word, on) => {
        const words = new Set((this.attributes.class ?? "").split(" ").filter((one) => one !== word));
        if (on) words.add(word);
        this.attributes.class = [...words].join(" ");
      },
    };
  }
  get id() { return this.attributes.id ?? ""; }
  get childElementCount() { return this.children.filter((one) => one.name !== "#text").length; }
  get textContent() { return this.text + this.children.map((one) => one.textContent).join(""); }
  set textContent(text) { this.children = text === "" ? [] : [new Node("#text", String(text))]; }
  set value(text) { this.attributes.value = text; }
  get value() { return this.attributes.value; }
  set max(text) { this.attributes.max = text; }
  setAttribute(name, value) { this.attributes[name] = String(value); }
  append(...given) {
    for (const one of given) {
      const child = one instanceof Node ? one : new Node("#text", String(one));
      child.parent = this;
      this.children.push(child);
    }
  }
  replaceChildren(...given) { this.children = []; this.append(...given); }
  addEventListener(kind, act) { this.heard[kind] = act; }
  closest(wanted) {
    for (let one = this; one; one = one.parent) if (one.is(wanted)) return one;
    return null;
  }
  is(wanted) {
    if (wanted[0] !== ".") return this.name === wanted;
    return (this.attributes.class ?? "").split(" ").includes(wanted.slice(1));
  }
  all(wanted) {
    const own = this.is(wanted) ? [this] : [];
    return [...own, ...this.children.flatMap((one) => one.all(wanted))];
  }
}

const main = new Node("main");
const written = new Node("script");
written.textContent = fs.readFileSync(0, "utf-8");
globalThis.document = {
  createElement: (name) => new Node(name),
  createElementNS: (_, name) => new Node(name),
  querySelector: (wanted) => (wanted === "main" ? main : null),
  getElementById: (id) => (id === "runs" ? written : null),
};

const seen = (section) => {
  const [strip] = section.all(".strip");
  const [panel] = section.all(".round");
  const sentence = () => panel.all("p")[0].textContent;
  const tell = () => section.all(".detail")[0].textContent;
  const press = (on, key) => on.heard.keydown({ key, preventDefault() {} });
  const tokens = strip.all(".token");
  strip.heard.focus?.();
  const first = { sentence: sentence(), detail: tell() };
  const told = tokens.map((_, i) => { if (i) press(strip, "ArrowRight"); return tell(); });
  const [slider] = section.all("input");
  slider.value = "1";
  slider.heard.input();
  const [previous, next] = section.all("button");
  const sentences = [sentence()];
  for (let i = 1; i < Number(slider.attributes.max); i += 1) {
    if (i % 2) next.heard.click(); else press(previous, "ArrowRight");
    sentences.push(sentence());
  }
  return {
    text: section.textContent,
    strip: tokens.map((token) => [token.attributes.class, token.textContent]),
    refused: strip.all("del").map((one) => one.textContent),
    figures: section.all(".figures")[0].all("dd").map((one) => one.textContent),
    bars: section.all(".histogram")[0].all("td").map((one) => one.textContent.trim()),
    elements: section.all("script").length + section.all("img").length,
    first, told, sentences,
    rows: panel.all("tr").map((row) => row.children.map((one) => one.textContent.trim())),
    boxes: panel.all("rect").length,
    active: strip.attributes["aria-activedescendant"],
  };
};

require("vm").runInThisContext(fs.readFileSync(process.argv[2], "utf-8"));
queueMicrotask(() => console.log(JSON.stringify(main.all("section").map(seen))));
