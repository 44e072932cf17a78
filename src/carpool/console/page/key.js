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

  constructor(onKey) {
    this.#form.addEventListener("submit", (event) => {
      event.preventDefault();
      const key = this.#input.value.trim();
      if (!key) return;
      sessionStorage.setItem(NAME, key);
      this.#input.value = "";
      onKey();
    });
  }

  show(wanted) {
    if (this.#form.hidden === !wanted) return;
    this.#form.hidden = !wanted;
    if (wanted) this.#input.focus();
  }
}
