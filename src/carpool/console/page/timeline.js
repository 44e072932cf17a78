// Which time is looked at: how much of it the charts show, where it ends, and in words what each figure covers.

import { find, setText } from "./dom.js";
import { clockTime, duration } from "./format.js";

const MINUTE_S = 60;

export class Timeline {
  span = 120;
  seconds = 10;
  end = Infinity; // else the clock at which it was paused
  #latest = null;
  #first = null;
  #changed;

  constructor(changed) {
    this.#changed = changed;
    for (const name of ["span", "seconds"]) {
      for (const input of document.querySelectorAll(`input[name="${name === "seconds" ? "window" : name}"]`)) {
        input.addEventListener("change", () => this.#set({ [name]: Number(input.value) }));
      }
    }
    find("pause").addEventListener("click", () => this.#set({ end: this.paused ? Infinity : this.#latest }));
    find("earlier").addEventListener("click", () => this.#move(-1));
    find("later").addEventListener("click", () => this.#move(1));
  }

  get paused() {
    return this.end !== Infinity;
  }

  /** The minute around a moment that somebody pointed at, `age` seconds before the end of what is shown. */
  zoomTo(age) {
    const middle = Math.min(this.end, this.#latest) - age;
    const input = document.querySelector('input[name="span"][value="60"]');
    input.checked = true;
    this.#set({ span: MINUTE_S, end: Math.min(this.#latest, middle + MINUTE_S / 2) });
  }

  show(first, latest) {
    this.#first = first;
    this.#latest = latest;
    const known = latest !== null;
    for (const name of ["pause", "earlier", "later"]) find(name).disabled = !known;
    setText(find("pause"), this.paused ? "Back to live" : "Pause");
    find("pause").setAttribute("aria-pressed", String(this.paused));
    find("earlier").hidden = find("later").hidden = !this.paused;
    setText(find("window-says"), known ? this.#words(Math.min(this.end, latest)) : "Nothing is known yet.");
  }

  #words(end) {
    const begin = Math.max(this.#first, end - this.span);
    const over = `Charts: ${clockTime(begin)} to ${clockTime(end)}. Percentiles: ${this.seconds} s, rates: 3 s, totals: 60 s, all up to ${clockTime(end)}`;
    return `${this.paused ? "Paused. " : ""}${over}. The server remembers ${duration(this.#latest - this.#first)}.`;
  }

  #move(direction) {
    const end = Math.min(this.end, this.#latest) + (direction * this.span) / 2;
    this.#set({ end: Math.max(this.#first + 1, Math.min(this.#latest, end)) });
  }

  #set(change) {
    Object.assign(this, change);
    this.#changed();
  }
}
