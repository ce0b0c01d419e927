// A reader predicts first: what the run gave stays covered until then, or until "Show me".
document.addEventListener("DOMContentLoaded", () => {
  const lab = location.pathname.split("/").pop().replace(/\.html$/, "");
  const forms = [...document.querySelectorAll("form.prediction")];
  // What was chosen, by form: a text for each slot; none after "Show me"; null before both.
  const chosen = new Map();

  // A slot is a field for a number, or a row of choices.
  const slotsOf = (form) => [...form.querySelectorAll("input, .choices")];
  const choicesOf = (slot) => [...slot.querySelectorAll(".choice")];
  const read = (slot) =>
    slot.value ?? choicesOf(slot).find((each) => each.ariaPressed === "true")?.textContent ?? "";
  const write = (slot, text) => {
    if (slot.matches("input")) slot.value = text;
    for (const each of choicesOf(slot)) each.ariaPressed = String(each.textContent === text);
  };
  const inWords = (slot) => {
    if (!slot.matches("input")) return `“${read(slot)}”`;
    const { name, unit } = slot.dataset;
    return [name && `${name}:`, read(slot), unit].filter(Boolean).join(" ");
  };

  // --- what this browser remembers ---
  const keyOf = (form) => `ddl-labs-prediction-${lab}-${form.id}`;
  const recall = (form) => {
    try {
      return JSON.parse(localStorage.getItem(keyOf(form)));
    } catch {
      return null; // a browser that keeps nothing asks again
    }
  };
  const keep = (form) => {
    try {
      if (chosen.get(form)) localStorage.setItem(keyOf(form), JSON.stringify(chosen.get(form)));
      else localStorage.removeItem(keyOf(form));
    } catch {
      // The choice is known until the reader leaves the page.
    }
  };

  // --- outputs: each has a note above it, and waits for one prediction or several ---
  const element = (name, className, ...content) => {
    const made = document.createElement(name);
    made.className = className;
    made.append(...content);
    return made;
  };
  const covers = document.querySelectorAll("[class*='result-of-']");
  const results = [...covers].flatMap((cell) => {
    const output = cell.matches(".cell") ? cell.querySelector(".cell_output") : cell;
    if (!output) return [];
    const tags = [...cell.classList].map((name) => name.replace(/^tag_/, ""));
    const waitsFor = forms.filter((form) => tags.includes(`result-of-${form.id}`));
    const link = element("a", "", "made your prediction");
    const show = element("button", "", "Show me");
    show.type = "button";
    show.addEventListener("click", () => {
      for (const form of waitsFor.filter((each) => !chosen.get(each))) settle(form, []);
      output.tabIndex = -1;
      output.focus();
    });
    const note = element("p", "cover", "Covered until you have ", link, ". ", show);
    output.prepend(note);
    return [{ output, note, link, waitsFor }];
  });
  const lineOf = new Map(); // the last output of a form says what the reader chose
  for (const { output, waitsFor } of results.filter((each) => each.output.matches(".cell_output"))) {
    for (const form of waitsFor) {
      lineOf.get(form)?.remove();
      lineOf.set(form, element("p", "your-choice"));
      output.prepend(lineOf.get(form));
    }
  }

  const draw = () => {
    for (const { output, note, link, waitsFor } of results) {
      const open = waitsFor.find((form) => !chosen.get(form));
      output.classList.toggle("covered", Boolean(open));
      note.hidden = !open;
      if (open) link.href = `#${open.id}`;
    }
    for (const form of forms) {
      const known = chosen.get(form);
      const words = known?.length ? `You chose ${slotsOf(form).map(inWords).join("; ")}. ` : "";
      form.querySelector(".chosen").textContent = known ? `${words}The result is below.` : "";
      form.querySelector(".show").hidden = Boolean(known);
      form.querySelector(".again").hidden = !known;
      const line = lineOf.get(form);
      if (!line) continue;
      line.textContent = `${words}The output below compares the prediction of the course's authors with the run.`;
    }
  };
  const settle = (form, texts) => {
    chosen.set(form, texts);
    keep(form);
    draw();
  };

  for (const form of forms) {
    const commit = () => settle(form, slotsOf(form).map(read));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      commit();
    });
    form.addEventListener("click", ({ target }) => {
      if (target.matches(".choice")) {
        write(target.closest(".choices"), target.textContent);
        if (slotsOf(form).every(read)) commit();
      } else if (target.matches(".show")) {
        settle(form, []);
        form.querySelector(".again").focus();
      } else if (target.matches(".again")) {
        for (const slot of slotsOf(form)) write(slot, "");
        settle(form, null);
        form.querySelector("input, .choice").focus();
      }
    });
    chosen.set(form, recall(form));
    slotsOf(form).forEach((slot, k) => write(slot, chosen.get(form)?.[k] ?? ""));
    form.hidden = false;
  }
  draw();
});
