// A reader predicts first: the folds with what the run gave open then, or after "Show me".
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

  // --- folds with outputs: each waits for one prediction or several ---
  const formsOf = (fold) => forms.filter((form) => fold.dataset.waitsFor.split(" ").includes(form.id));
  const foldsOf = new Map(forms.map((form) => [form, []]));
  for (const fold of document.querySelectorAll("details[data-waits-for]")) {
    for (const form of formsOf(fold)) foldsOf.get(form).push(fold);
  }
  const lineOf = new Map(); // the last output of a form says what the reader chose
  for (const [form, folds] of foldsOf) {
    const line = document.createElement("p");
    line.className = "your-choice";
    lineOf.set(form, line);
    folds.at(-1)?.querySelector("summary").after(line);
  }

  const draw = (form) => {
    const known = chosen.get(form);
    const words = known?.length ? `You chose ${slotsOf(form).map(inWords).join("; ")}. ` : "";
    form.querySelector(".chosen").textContent = known ? `${words}The result is below.` : "";
    form.querySelector(".show").hidden = Boolean(known);
    form.querySelector(".again").hidden = !known;
    lineOf.get(form).textContent = `${words}The output below compares the prediction of the course's authors with the run.`;
    for (const fold of foldsOf.get(form)) fold.open = formsOf(fold).every((each) => chosen.get(each));
  };
  const settle = (form, texts) => {
    chosen.set(form, texts);
    keep(form);
    draw(form);
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
  forms.forEach(draw);
});
