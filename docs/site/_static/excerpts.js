// A search result shows the text around the first word that it has found.
document.addEventListener("DOMContentLoaded", () => {
  const place = document.getElementById("search-results");
  const words = new URLSearchParams(location.search).get("q")?.match(/[\p{L}\p{N}_]+/gu);
  if (!place || !words) return;
  const stems = words.map((word) => new Stemmer().stemWord(word.toLowerCase()));
  const any = new RegExp(`(${[...words, ...stems].join("|")})`, "iu");

  const around = (text) => {
    const at = text.search(any);
    const start = at < 90 ? 0 : text.indexOf(" ", at - 90) + 1;
    const rest = text.slice(start);
    const shown = rest.length <= 240 ? rest : `${rest.slice(0, rest.lastIndexOf(" ", 240))} …`;
    return start ? `… ${shown}` : shown;
  };
  const explain = (result) => {
    result.classList.add("explained");
    const { hash, href } = result.querySelector("a");
    const page = href.slice(new URL(".", location.href).href.length).replace(/\.html.*$/, "");
    const parts = window.TEXTS[page] ?? [];
    const part =
      parts.find(([names]) => names.includes(decodeURIComponent(hash.slice(1)))) ??
      parts.find(([, text]) => any.test(text)) ??
      parts[0];
    if (!part) return;
    const excerpt = document.createElement("p");
    excerpt.className = "context";
    around(part[1]).split(any).forEach((piece, k) => {
      const text = document.createElement("span");
      if (k % 2) text.className = "highlighted"; // every second piece is a word
      text.textContent = piece;
      excerpt.append(text);
    });
    result.append(excerpt);
  };
  const explainAll = () => place.querySelectorAll("ul.search > li:not(.explained)").forEach(explain);

  const script = document.createElement("script"); // the texts of all pages
  script.src = "_static/texts.js";
  script.addEventListener("load", () => {
    explainAll();
    new MutationObserver(explainAll).observe(place, { childList: true, subtree: true });
  });
  document.head.append(script);
});
