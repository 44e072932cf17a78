// Who asks, and what the server takes for it: sources and keys by rate, cores, memory and GPUs.

import { el, find, setText } from "./dom.js";
import { bytes, number, percent, rate } from "./format.js";
import { card } from "./live.js";

const MOST = 8;

export class SendersPanel {
  #senders = card("Busiest clients", "senders");
  #list = el("ul", { class: "reasons" });

  constructor() {
    this.#senders.body.append(this.#list);
    find("live-grid").append(this.#senders.node);
  }

  /** `point` is the second that is looked at. */
  show(point, model) {
    const { senders } = point ?? {};
    this.#senders.node.hidden = !senders;
    showServer(point?.server);
    if (!senders) return; // who may not see them
    const own = senders.filter((sender) => sender.model === model.name).slice(0, MOST);
    this.#list.replaceChildren(...own.map(line));
    if (!own.length) this.#list.append(el("li", { class: "hint" }, "No requests in this second."));
    setText(this.#senders.note, "images per second, by source and key");
  }
}

function line({ source, key, offered_rps: offered, queued, rejected }) {
  const name = el("b", {}, el("bdi", {}, source || "no source"));
  const more = [key && `key ${key}`, queued && `${number(queued)} queued`, rejected && "some rejected"].filter(Boolean).join(" · ");
  return el("li", {}, name, el("p", { class: "hint" }, more), el("span", { class: "figure" }, rate(offered)));
}

function showServer(server) {
  if (!server) return;
  setText(find("server-cores"), number(server.cores));
  setText(find("server-memory"), bytes(server.memory_bytes));
  const gpus = server.gpus.filter((gpu) => gpu.utilization !== null);
  find("server-gpu").parentElement.hidden = !gpus.length;
  setText(find("server-gpu"), gpus.map((gpu) => percent(gpu.utilization)).join(", "));
}
