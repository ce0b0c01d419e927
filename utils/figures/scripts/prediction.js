// The keys of a prediction's form in JupyterLab and Notebook 7, see prediction_form.py. The form has
// the focus when its cell has run. Enter commits what was typed, or presses the button, and goes on
// to the next cell; Shift+Enter also runs that cell. Arrows move between the buttons. At first no
// button has the focus, so that a student who goes on in haste has chosen nothing.
(() => {
  const area = document.currentScript?.closest(".jp-OutputArea");
  if (!area) return;
  // A notebook that is opened or reloaded has this script, too, but nobody waits for its form.
  const isNew = Date.now() - SHOWN < 10000;
  const ends = Date.now() + 10000;

  // Wait until the widgets are there.
  function look() {
    const box = area.querySelector(".ddl-prediction");
    if (box?.querySelector("input, button")) listen(box);
    else if (Date.now() < ends) setTimeout(look, 50);
  }

  function listen(box) {
    const fields = () => [...box.querySelectorAll("input")];
    const buttons = () => [...box.querySelectorAll("button")];
    box.tabIndex = -1;
    // JupyterLab draws no frame around a focused element of an output.
    box.addEventListener("focus", () => (box.style.outline = "2px solid currentColor"));
    box.addEventListener("blur", () => (box.style.outline = ""));
    box.addEventListener("keydown", (event) => answer(event, box, fields(), buttons()), true);
    // The result replaces this button, which would take the focus with it.
    const skip = area.querySelector(".ddl-skip");
    skip?.addEventListener("click", () => goOn(false));
    if (!isNew) return;
    const chosen = buttons().find((button) => button.querySelector(".fa-check"));
    const first = fields().find((field) => !field.value) ?? fields()[0] ?? chosen ?? box;
    // A reader who works elsewhere keeps the focus there.
    const notebook = area.closest(".jp-Notebook");
    const active = document.activeElement;
    const free = active === document.body || notebook?.contains(active);
    if (free && !active.closest?.(".cm-editor")) first.focus();
  }

  function answer(event, box, fields, buttons) {
    const { key, target } = event;
    const place = buttons.indexOf(target);
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[key];
    if (target === box) {
      if (key === "Enter" || key === "Escape") goOn(event.shiftKey);
      else if (step) buttons.at(step > 0 ? 0 : -1)?.focus();
      else return;
    } else if (key === "Enter") {
      if (place >= 0) target.click();
      else target.blur(); // the field reports its value
      if (place < 0 && !isNumber(target)) {
        // What is typed next belongs into the field, not to the notebook.
        target.focus();
        target.select();
        event.preventDefault();
        event.stopPropagation();
        return;
      }
      const empty = fields.slice(fields.indexOf(target) + 1).find((field) => !field.value);
      if (place < 0 && empty) empty.focus();
      else goOn(event.shiftKey);
    } else if (key === "Escape") goOn(false);
    else if (step && place >= 0) buttons[(place + step + buttons.length) % buttons.length].focus();
    else {
      if (key === " ") event.stopPropagation();
      return;
    }
    event.preventDefault();
    event.stopPropagation();
  }

  // A field may be empty, and a number may have its unit.
  function isNumber(field) {
    const unit = field.closest(".widget-hbox")?.lastElementChild?.textContent.trim() ?? "";
    const text = field.value.trim();
    const number = unit && text.endsWith(unit) ? text.slice(0, -unit.length) : text;
    return Number.isFinite(Number(number.replaceAll(/[_,]/g, "")));
  }

  // Make the next cell the active one, and perhaps run it.
  function goOn(run) {
    const cell = area.closest(".jp-Cell");
    const next = cell?.nextElementSibling ?? cell;
    if (!next) return;
    next.focus();
    if (!run) return;
    const keys = { key: "Enter", code: "Enter", keyCode: 13, shiftKey: true };
    next.dispatchEvent(new KeyboardEvent("keydown", { ...keys, bubbles: true, cancelable: true }));
  }

  look();
})();
