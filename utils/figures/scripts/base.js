// The tools that the script of a picture gets as `ddl`, see interactive.py. Each picture has its
// own closure, so that many on one page don't disturb each other. `colors` comes from palette.py.

const SVG = "http://www.w3.org/2000/svg";
const calm = window.matchMedia("(prefers-reduced-motion: reduce)");

// Run a picture's script. If the script fails, the still picture stays.
function start(frame, data, script) {
  const root = document.createElement("div");
  // JupyterLab would take an arrow for the way to the next cell. Shift+Enter is this way.
  root.addEventListener("keydown", (event) => {
    if (event.shiftKey && event.key === "Enter") return;
    if (event.target.matches("input, button") && /^(Arrow|Page|Home|End|Enter| )/.test(event.key))
      event.stopPropagation();
  });
  leaveTheKeys(root);
  try {
    script(root, data, tools(root));
  } catch (error) {
    console.error("The picture stays still:", error);
    return;
  }
  frame.querySelector("img").replaceWith(root);
}

// A reader who points or clicks keeps the keys of the notebook: only Tab brings the focus here.
function leaveTheKeys(root) {
  const moves = (target) => target.closest("input[type=range], a, .ddl-wide");
  root.addEventListener("mousedown", (event) => {
    if (!moves(event.target)) event.preventDefault();
  });
  // A slider needs the focus while the pointer moves it.
  root.addEventListener("change", (event) => {
    const cell = root.closest(".jp-Cell");
    if (event.target.matches("input") && !event.target.matches(":focus-visible")) cell?.focus();
  });
}

// Return a new id. A notebook may be open twice on a page, so the piece's own id isn't enough.
function unique(name) {
  return `ddl-${name}-${Math.random().toString(36).slice(2, 10)}`;
}

// Give an element its attributes, its listeners (`onclick: function`) and its children.
function furnish(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (typeof value === "function") node.addEventListener(name.slice(2), value);
    else if (name.startsWith("aria-")) node.setAttribute(name, String(value));
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined)
      node.setAttribute(name, value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

// Return a number with at most three digits.
function short(number) {
  return String(Number(Number(number).toPrecision(3)));
}

// Return a number in the first unit that is not too large for it.
function inUnits(number, units) {
  const size = Math.abs(number);
  const [unit, one] = units.find(([, one]) => size >= 0.9995 * one) ?? units[units.length - 1];
  return `${short(number / one)} ${unit}`;
}

function seconds(number) {
  return number === 0
    ? "0 s"
    : inUnits(number, [
        ["s", 1],
        ["ms", 1e-3],
        ["µs", 1e-6],
      ]);
}

function bytes(number) {
  return inUnits(number, [
    ["GB", 1e9],
    ["MB", 1e6],
    ["kB", 1e3],
    ["B", 1],
  ]);
}

function tools(root) {
  const svg = (tag, attributes, ...children) =>
    furnish(document.createElementNS(SVG, tag), attributes, children);
  const html = (tag, attributes, ...children) =>
    furnish(document.createElement(tag), attributes, children);

  // Return a button.
  function button(label, onclick, attributes = {}) {
    return html("button", { type: "button", class: "ddl-button", onclick, ...attributes }, label);
  }

  // Return a row of controls.
  function controls(...children) {
    return html("div", { class: "ddl-controls" }, ...children);
  }

  // Return a slider with its label and its value in words. `node.read()` and `node.set(value)` read
  // and set the value; `oninput(value)` hears of each move, but not of `set`.
  function slider({ label, min, max, step, value, unit = "", format, log = false }, oninput) {
    const inward = log ? Math.log10 : (number) => number;
    const outward = log ? (number) => 10 ** number : (number) => number;
    const words = format ?? ((number) => `${short(number)} ${unit}`.trim());
    const id = unique("slider");
    const [low, high] = [inward(min), inward(max)];
    const input = html("input", {
      ...{ type: "range", id, min: low, max: high },
      step: step ?? (log ? (high - low) / 200 : "any"),
      oninput: () => {
        tell();
        oninput(read());
      },
    });
    const output = html("output", { for: id });
    const read = () => outward(Number(input.value));
    function tell() {
      output.textContent = words(read());
      input.setAttribute("aria-valuetext", words(read()));
    }
    function set(number) {
      input.value = inward(number);
      tell();
    }
    set(value ?? min);
    const node = html(
      "div",
      { class: "ddl-slider" },
      html("label", { for: id }, label),
      input,
      output,
    );
    return Object.assign(node, { read, set });
  }

  // Return buttons of which one is chosen. Options are words, or pairs of a value and its words.
  // `node.read()` and `node.set(value)` as for a slider.
  function choice({ label, options, value }, onchange) {
    const name = unique("choice");
    const pairs = options.map((option) => (Array.isArray(option) ? option : [option, option]));
    const inputs = pairs.map(([each], k) =>
      html("input", { type: "radio", name, value: k, onchange: () => onchange(each) }),
    );
    const read = () => pairs[inputs.findIndex((input) => input.checked)][0];
    function set(wanted) {
      inputs[
        Math.max(
          pairs.findIndex(([each]) => each === wanted),
          0,
        )
      ].checked = true;
    }
    set(value ?? pairs[0][0]);
    const labels = inputs.map((input, k) => html("label", {}, input, pairs[k][1]));
    const node = html("fieldset", { class: "ddl-choice" }, html("legend", {}, label), ...labels);
    return Object.assign(node, { read, set });
  }

  // Return a line of text that screen readers read aloud when `node.say(text)` changes it.
  function status(text = "") {
    const node = html("p", { class: "ddl-status", role: "status", "aria-live": "polite" }, text);
    const say = (words) => {
      if (node.textContent !== words) node.textContent = words;
    };
    return Object.assign(node, { say });
  }

  // Call `draw(width)` with the pixels that the picture has across: now, and whenever they change.
  function onWidth(draw) {
    let before = 0;
    const observer = new ResizeObserver(([entry]) => {
      const width = Math.floor(entry.contentRect.width);
      if (width > 0 && width !== before) draw((before = width));
    });
    observer.observe(root);
  }

  // Call `draw(share)` with shares from 0 to 1 in so many seconds, then `done()`; return a function
  // that stops. Readers who asked their system for less motion see the end at once.
  function animate(length, draw, done = () => {}) {
    let frame = 0;
    const begin = performance.now();
    function step() {
      const share = calm.matches ? 1 : Math.min((performance.now() - begin) / (1000 * length), 1);
      draw(share);
      if (share < 1) frame = requestAnimationFrame(step);
      else done();
    }
    frame = requestAnimationFrame(step);
    return () => cancelAnimationFrame(frame);
  }

  // Add a hatch to a drawing, and return it as a `fill`. Waiting is hatched in all pictures.
  function hatch(drawing, color, { angle = 45, gap = 6, ground = "transparent" } = {}) {
    const id = unique("hatch");
    const turn = `rotate(${angle})`;
    const look = {
      id,
      width: gap,
      height: gap,
      patternUnits: "userSpaceOnUse",
      patternTransform: turn,
    };
    const pattern = svg(
      ...["pattern", look, svg("rect", { width: gap, height: gap, fill: ground })],
      svg("rect", { width: gap / 2, height: gap, fill: color }),
    );
    drawing.append(svg("defs", {}, pattern));
    return `url(#${id})`;
  }

  return {
    ...{ root, svg, html, button, controls, slider, choice, status, onWidth, animate, hatch },
    ...{ unique, short, seconds, bytes },
    colors: {
      ...colors,
      rank: (rank) => colors.ranks[rank % colors.ranks.length],
      // They follow the theme of the page.
      ...{ ink: "var(--ddl-ink)", paper: "var(--ddl-paper)", pale: "var(--ddl-pale)" },
      soft: "var(--ddl-soft)",
    },
    // Whether the reader asked for less motion.
    calm: () => calm.matches,
  };
}
