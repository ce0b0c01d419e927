// "Open in my hub": the address is asked for once, and kept in this browser.
document.addEventListener("DOMContentLoaded", () => {
  const place = document.querySelector(".launch[data-hub]");
  if (!place) return;
  const button = place.querySelector(".hub");
  const form = place.querySelector("form");
  const field = place.querySelector("input");
  const key = "ddl-labs-hub";
  const kept = (value) => {
    try {
      if (value !== undefined) localStorage.setItem(key, value);
      return localStorage.getItem(key) || "";
    } catch {
      return value || ""; // a browser that keeps nothing asks again
    }
  };

  field.value = kept();
  button.hidden = false;
  button.addEventListener("click", () => {
    form.hidden = !form.hidden;
    button.setAttribute("aria-expanded", String(!form.hidden));
    if (!form.hidden) field.focus();
  });
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const hub = field.value.trim().replace(/\/+$/, "").replace(/\/hub(\/.*)?$/, "");
    kept(hub);
    location.assign(hub + place.dataset.hub);
  });
});
