// The key that a server may ask for: kept in this tab and no longer, and sent with every question.

import { find } from "./dom.js";

const NAME = "carpool-key";

export const hasKey = () => sessionStorage.getItem(NAME) !== null;

/** These headers, and the key if there is one. */
export function keyed(headers = {}) {
  const key = sessionStorage.getItem(NAME);
  return key === null ? headers : { ...headers, authorization: `Bearer ${key}` };
}

/** Asks for a key while the server wants another one; `onKey` is called when somebody gave one. */
export class KeyPanel {
  #form = find("key-form");
  #input = find("key");
  #label = this.#form.querySelector("label");
  #usual = this.#label.textContent;
  #asked = false;

  constructor(onKey) {
    this.#form.addEventListener("submit", (event) => {
      event.preventDefault();
      const key = this.#input.value.trim();
      if (!key) return;
      sessionStorage.setItem(NAME, key);
      this.#input.value = "";
      this.#asked = false;
      this.#label.textContent = this.#usual;
      onKey();
    });
  }

  /** For something that the key there is does not open; it stays until somebody gives another. */
  ask(why) {
    this.#asked = true;
    this.#label.textContent = why;
    this.show(true);
    this.#input.focus();
    this.#form.scrollIntoView({ block: "nearest" });
  }

  show(asked) {
    const wanted = asked || this.#asked;
    if (this.#form.hidden === !wanted) return;
    this.#form.hidden = !wanted;
    if (wanted) this.#input.focus();
  }
}
