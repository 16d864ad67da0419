"use strict";
// The search runs in a worker, which browsers do not start for pages that are opened as files.
// There the same script runs in a hidden frame, whose window stands for the worker's own.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(address) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.inner = frame.contentWindow;
      this.inner.postMessage = (data) => this.heard(data);
      const script = this.inner.document.createElement("script");
      script.src = address;
      this.ready = new Promise((done) => script.addEventListener("load", done));
      this.inner.document.body.append(script);
    }

    heard(data) {
      const event = new MessageEvent("message", { data });
      this.dispatchEvent(event);
      this.onmessage?.(event);
    }

    postMessage(data) {
      this.ready.then(() => {
        this.inner.dispatchEvent(new this.inner.MessageEvent("message", { data }));
      });
    }

    terminate() {
      this.inner.frameElement.remove();
    }
  };
}
