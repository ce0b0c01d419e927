// Which labs a reader has read: a check mark beside their links, kept in this browser.
document.addEventListener("DOMContentLoaded", () => {
  const nameOf = (path) => path.match(/\/labs\/(\d\d_\w+)\.html$/)?.[1];
  const key = (lab) => `ddl-labs-read-${lab}`;
  const isRead = (lab) => {
    try {
      return localStorage.getItem(key(lab)) !== null;
    } catch {
      return false; // this browser keeps nothing
    }
  };
  const keep = (lab, read) => {
    try {
      if (read) localStorage.setItem(key(lab), "read");
      else localStorage.removeItem(key(lab));
    } catch {
      // The mark goes when the reader leaves the page.
    }
  };

  // The sidebar, the map on the front page, and the list of labs.
  const links = document.querySelectorAll("nav.bd-docs-nav a, .course-map a, .bd-article dt a");
  const signs = new Map();
  const mark = (link, read) => {
    signs.get(link)?.remove();
    if (!read) return;
    const sign = document.createElement("span");
    sign.className = "is-read";
    sign.innerHTML = '<span aria-hidden="true">✓</span><span class="said">, read</span>';
    signs.set(link, sign);
    if (link.hasAttribute("aria-label")) link.after(sign); // words inside would not be heard
    else link.append(sign);
  };
  for (const link of links) {
    const lab = nameOf(link.pathname);
    if (lab) mark(link, isRead(lab));
  }

  const end = document.querySelector(".end-of-lab");
  if (!end) return;
  const here = nameOf(location.pathname);
  const button = end.querySelector("button");
  const draw = (read) => {
    button.textContent = read ? "✓ Read. Mark as unread" : "Mark as read";
    for (const link of links) if (nameOf(link.pathname) === here) mark(link, read);
  };
  const set = (read) => {
    keep(here, read);
    draw(read);
  };
  const seen = new IntersectionObserver(([entry]) => {
    if (!entry.isIntersecting) return;
    seen.disconnect(); // from here on only the button changes it
    set(true);
  });
  button.addEventListener("click", () => {
    seen.disconnect();
    set(!button.textContent.startsWith("✓"));
  });
  draw(isRead(here));
  end.hidden = false;
  seen.observe(end);
});
