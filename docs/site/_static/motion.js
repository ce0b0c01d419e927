// A moving picture can be paused. It stands still at first for readers who want less motion.
document.addEventListener("DOMContentLoaded", () => {
  const calm = matchMedia("(prefers-reduced-motion: reduce)").matches;
  for (const moving of document.querySelectorAll(".bd-article img[src$='.gif']")) {
    const still = document.createElement("canvas"); // the first scene
    still.setAttribute("role", "img");
    still.setAttribute("aria-label", moving.alt);
    const button = document.createElement("button");
    button.type = "button";
    const box = document.createElement("span");
    box.className = "moving";
    moving.replaceWith(box);
    box.append(moving, still, button);

    const show = (moves) => {
      moving.hidden = !moves;
      still.hidden = moves;
      button.textContent = moves ? "Pause" : "Play";
    };
    const begin = () => {
      still.width = moving.naturalWidth;
      still.height = moving.naturalHeight;
      still.getContext("2d").drawImage(moving, 0, 0);
      show(!calm);
    };
    button.addEventListener("click", () => {
      if (moving.hidden) moving.src = moving.src; // from its beginning
      show(moving.hidden);
    });
    if (moving.complete) begin();
    else moving.addEventListener("load", begin, { once: true });
  }
});
