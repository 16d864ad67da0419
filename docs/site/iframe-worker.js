"use strict";
// The search runs in a worker, which browsers do not start for pages that are opened as files.
// There the same script runs in a hidden frame, whose window stands for the worker's own. Messages
// arrive later and as copies, as a worker's do.
if (location.protocol === "file:") {
  const send = (target, Kind, data) => {
    const copy = structuredClone(data);
    setTimeout(() => target.dispatchEvent(new Kind("message", { data: copy })));
  };
  window.Worker = class extends EventTarget {
    constructor(address) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.inner = frame.contentWindow;
      this.inner.postMessage = (data) => send(this, MessageEvent, data);
      const script = this.inner.document.createElement("script");
      script.src = address;
      this.ready = new Promise((done) => script.addEventListener("load", done));
      this.inner.document.body.append(script);
    }

    set onmessage(heard) {
      this.addEventListener("message", heard);
    }

    postMessage(data) {
      this.ready.then(() => send(this.inner, this.inner.MessageEvent, data));
    }

    terminate() {
      this.inner.frameElement.remove();
    }
  };
}
