// Puts a choice of the versions beside the site's name. It is told them, newest first, by the file that it stands
// in, as a page that is opened as a file may load a script and nothing else.
"use strict";
((versions) => {
  const script = document.currentScript;
  const top = new URL(".", script.src);
  const here = location.href.split(/[?#]/)[0].slice(top.href.length);
  const current = decodeURIComponent(here.split("/")[0]);
  const page = decodeURIComponent(here.slice(here.indexOf("/") + 1)) || "index.html";
  document.addEventListener("DOMContentLoaded", () => {
    const made = (tag, name, text) => {
      const element = document.createElement(tag);
      element.className = name;
      element.textContent = text || "";
      return element;
    };
    const choice = made("div", "md-version");
    const shown = made("button", "md-version__current", current);
    shown.setAttribute("aria-label", "Select version, shown is " + current);
    const list = made("ul", "md-version__list");
    for (const { version, title, properties } of versions) {
      const link = made("a", "md-version__link", title);
      // The same page where that version has it, else its start.
      link.href = new URL(version + "/" + (properties.pages.includes(page) ? page : "index.html"), top);
      const item = made("li", "md-version__item");
      item.append(link);
      list.append(item);
    }
    choice.append(shown, list);
    document.querySelector(".md-header__topic").append(choice);
  });
})(VERSIONS);
