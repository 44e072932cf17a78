// Light or dark: the system's choice until somebody presses the button.

import { find, setText } from "./dom.js";

const KEY = "carpool-theme";

export function offerThemes() {
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const button = find("theme");
  const current = () => root.dataset.theme ?? (system.matches ? "dark" : "light");
  const show = () => {
    const other = current() === "dark" ? "light" : "dark";
    setText(button, other === "dark" ? "Dark" : "Light");
    button.setAttribute("aria-label", `Switch to the ${other} theme`);
  };
  button.addEventListener("click", () => {
    root.dataset.theme = current() === "dark" ? "light" : "dark";
    try {
      localStorage.setItem(KEY, root.dataset.theme);
    } catch {
      // Storage can be switched off; it then lasts as long as the page.
    }
    show();
  });
  system.addEventListener("change", show);
  show();
}
