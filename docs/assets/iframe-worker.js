// Browsers start no workers for pages that are opened from a disk (file://). There, the search runs in a hidden frame.
// The name of this file is what the offline plugin looks for; without it, the plugin loads such a script from a network.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.documentElement.append(frame)
      this.scope = frame.contentWindow
      this.scope.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }))
      this.scope.importScripts = async (...urls) => {
        for (const each of urls) await load(this.scope, each)
      }
      this.ready = load(this.scope, new URL(url, document.baseURI).href)
    }

    postMessage(data) {
      this.ready.then(() => this.scope.dispatchEvent(new MessageEvent("message", { data })))
    }
  }
}

function load(scope, url) {
  return new Promise((resolve, reject) => {
    const script = scope.document.createElement("script")
    script.src = url
    script.onload = resolve
    script.onerror = reject
    scope.document.head.append(script)
  })
}
