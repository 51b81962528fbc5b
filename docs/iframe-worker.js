/* Search in a site that is read from a folder. A browser starts no worker from a file:// page, so the script of the worker runs in a
   hidden frame instead, which answers by the same messages. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(address) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      this.ready = new Promise((resolve) => {
        const start = () => {
          document.body.append(frame);
          const inside = frame.contentWindow;
          const load = (source) =>
            new Promise((loaded) => {
              const element = inside.document.createElement("script");
              element.src = source;
              element.onload = loaded;
              inside.document.head.append(element);
            });
          inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
          inside.importScripts = (...sources) =>
            sources.reduce((before, source) => before.then(() => load(source)), Promise.resolve());
          load(address).then(() => resolve(inside));
        };
        if (document.body) start();
        else window.addEventListener("DOMContentLoaded", start);
      });
    }

    postMessage(data) {
      this.ready.then((inside) => inside.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
