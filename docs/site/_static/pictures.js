// A picture opens large when a reader taps it, or presses the button in its corner.
document.addEventListener("DOMContentLoaded", () => {
  const not = "a img, .ddl-interactive img, [src$='.gif']"; // links, and pictures that answer or move
  const pictures = document.querySelectorAll(`.bd-article img:not(${not})`);
  if (!pictures.length) return;
  const element = (name, className, text = "") => {
    const made = document.createElement(name);
    made.className = className;
    made.textContent = text;
    return made;
  };

  const dialog = element("dialog", "large-picture");
  dialog.setAttribute("aria-label", "Enlarged picture");
  const close = element("button", "", "Close");
  close.type = "button";
  const place = element("div", "place"); // it scrolls by keyboard, too
  place.tabIndex = 0;
  const large = element("img", "");
  place.append(large);
  dialog.append(close, place);
  document.body.append(dialog);
  close.addEventListener("click", () => dialog.close());
  dialog.addEventListener("click", ({ target }) => {
    if (target === dialog || target === large) dialog.close(); // beside the picture, or on it
  });

  for (const picture of pictures) {
    const box = element("span", "can-enlarge");
    const button = element("button", "enlarge", "⤢");
    button.type = "button";
    button.setAttribute("aria-label", "Enlarge the picture");
    picture.replaceWith(box);
    box.append(picture, button);
    const open = () => {
      large.src = picture.src;
      large.alt = picture.alt;
      large.style.minWidth = `${picture.naturalWidth}px`;
      button.focus(); // where a reader is again after closing
      dialog.showModal();
    };
    picture.addEventListener("click", open);
    button.addEventListener("click", open);
  }
});
