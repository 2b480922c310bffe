// Theme: what the system prefers, until the button is used.
"use strict";

const theme = {
  button: document.getElementById("theme"),
  system: matchMedia("(prefers-color-scheme: dark)"),

  // Storage of pages from disk is refused by some browsers; then a choice lasts as long as the page.
  stored() {
    try { return localStorage.getItem("saccade-theme"); } catch { return null; }
  },

  show(name) {
    document.documentElement.dataset.theme = name;
    theme.button.textContent = name === "dark" ? "Light" : "Dark";
    theme.button.setAttribute("aria-label", `Switch to ${name === "dark" ? "light" : "dark"} colours`);
  },

  toggle() {
    const name = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    theme.show(name);
    try { localStorage.setItem("saccade-theme", name); } catch { /* see above */ }
  },

  start() {
    theme.button.hidden = false;
    theme.button.addEventListener("click", theme.toggle);
    theme.system.addEventListener("change", () => theme.stored() || theme.follow());
    theme.stored() ? theme.show(theme.stored()) : theme.follow();
  },

  follow() { theme.show(theme.system.matches ? "dark" : "light"); },
};
theme.start();
