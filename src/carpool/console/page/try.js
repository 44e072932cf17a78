// The panel where a picture meets a model.

import { drawable, rendered, summary } from "./answers.js";
import { metadataLine, predictLine } from "./curl.js";
import { hasKey } from "./key.js";
import { el, find, setText, setTone } from "./dom.js";
import { milliseconds } from "./format.js";
import { Overlay } from "./overlay.js";
import { takePictures } from "./picture.js";
import { predict } from "./predict.js";
import { notAPicture } from "./refusals.js";
import { stackBar } from "./stack.js";
import { breakdown } from "./timing.js";

const NO_PICTURES = "This model takes tensors through the v2 protocol, not images.";
const noPictures = (model) => (model?.ask ? `${NO_PICTURES} For images: ${model.ask}.` : NO_PICTURES);
const INVITATION = "Drop an image here, paste one, or choose one.";

export class TryPanel {
  #overlay = new Overlay();
  #picture = find("picture");
  #status = find("answer-status");
  #body = find("answer-body");
  #model = null;
  #file = null;
  #url = null;
  #running = new AbortController();

  constructor() {
    takePictures((file) => this.#take(file), () => this.#refuse(notAPicture));
    find("again").addEventListener("click", () => this.#send());
    find("copy").addEventListener("click", () => this.#copy());
    this.#picture.addEventListener("load", () => this.#picture.toggleAttribute("hidden", false));
    this.#picture.addEventListener("error", () => this.#picture.toggleAttribute("hidden", true));
  }

  /** Called with every poll; only a different model changes anything. */
  use(model) {
    const before = this.#model;
    this.#model = model;
    if (before?.name === model.name && before?.version === model.version && before?.task === model.task) return;
    setText(find("stage-hint"), model.task ? INVITATION : noPictures(model));
    document.querySelector(".actions").hidden = !model.task;
    this.#showCommand();
    if (this.#file && model.task) this.#send();
    else if (before) this.#forget(model.task ? "No image yet." : noPictures(model));
    else if (!model.task) setText(this.#status, noPictures(model));
  }

  #take(file) {
    this.#file = file;
    if (this.#url) URL.revokeObjectURL(this.#url);
    this.#url = URL.createObjectURL(file);
    this.#picture.alt = `The image ${file.name}`;
    this.#picture.src = this.#url;
    find("stage-empty").hidden = true;
    this.#showCommand();
    this.#send();
  }

  async #send() {
    if (!this.#model?.task) {
      this.#forget(noPictures(this.#model));
      return;
    }
    this.#running.abort();
    this.#running = new AbortController();
    const { name } = this.#model;
    this.#overlay.clear();
    find("stage").classList.add("busy");
    this.#say(`Asking ${name} …`, "quiet");
    const result = await predict(this.#file, name, this.#running.signal);
    if (result === null) return; // a newer one is on its way
    find("stage").classList.remove("busy");
    find("again").disabled = false;
    this.#showTime(result);
    if (result.refusal) this.#refuse(result.refusal);
    else await this.#showAnswer(result.answer);
  }

  async #showAnswer(answer) {
    const things = drawable(answer);
    const said = summary(answer, things);
    this.#say(said, "good");
    const list = rendered(answer, things, (index) => this.#overlay.highlight(index));
    this.#body.replaceChildren(...(list ? [list] : []));
    const { width, height } = answer.image ?? {};
    if (width > 0 && height > 0) await this.#overlay.show({ width, height }, things, said, answer.depth?.png ?? answer.anomaly?.map.png ?? null);
  }

  #refuse(refusal) {
    this.#overlay.clear();
    this.#say(refusal.title, refusal.tone);
    const lines = refusal.lines.map((line) => el("p", {}, line));
    const said = refusal.said ? [el("p", { class: "said" }, refusal.said)] : [];
    const reason = refusal.reason ? [el("p", { class: "hint" }, "reason: ", el("code", {}, refusal.reason))] : [];
    this.#body.replaceChildren(el("div", { class: "refusal" }, ...lines, ...said, ...reason));
  }

  #forget(text) {
    this.#running.abort();
    find("stage").classList.remove("busy");
    this.#overlay.clear();
    this.#say(text, "quiet");
    this.#body.replaceChildren();
    find("answer-time").hidden = true;
  }

  #say(text, tone) {
    setTone(this.#status, tone);
    setText(this.#status, text);
  }

  #showTime({ timing, totalMs }) {
    find("answer-time").hidden = totalMs === undefined;
    if (totalMs === undefined) return;
    const { server, parts } = breakdown(totalMs, timing);
    stackBar(find("time-bar"), find("time-legend"), parts);
    const notes = [`${milliseconds(totalMs)} in all`];
    if (timing.batch) notes.push(timing.batch === 1 ? "alone in its batch" : `batch of ${timing.batch}`);
    if (this.#model?.slo_ms && server) notes.push(`${milliseconds(server)} of ${milliseconds(this.#model.slo_ms)} SLO`);
    setText(find("time-note"), notes.join(" · "));
  }

  #showCommand() {
    const { name, version, task } = this.#model ?? { name: "", version: "", task: null };
    const line = task
      ? predictLine(location.origin, name, this.#file?.name ?? "image.jpg", this.#file?.type ?? "image/jpeg", hasKey())
      : metadataLine(location.origin, name, version, hasKey());
    setText(find("curl"), name ? line : "");
  }

  async #copy() {
    const code = find("curl");
    try {
      await navigator.clipboard.writeText(code.textContent);
      setText(find("copied"), "Copied");
      setText(find("copy"), "Copied");
      setTimeout(() => setText(find("copy"), "Copy"), 1500);
    } catch {
      getSelection().selectAllChildren(code); // a page without TLS has no clipboard; one key is left to press
      setText(find("copied"), "Selected: press Ctrl-C to copy");
    }
  }
}
