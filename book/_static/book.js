// Small things that style sheets cannot do. Without scripts wide equations scroll, and closed checks open by a click.
if (location.protocol !== "file:") DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = true; // it fetches pages

// What a search shows of a page is its text, in which formulas are TeX: their words stay, their marks go.
const spoken = (tex) =>
  tex
    .replace(/\\(mathrm|mathbf|mathbb|mathcal|operatorname|text|bigl|bigr|Bigl|Bigr|left|right|qquad|quad)\b\*?/g, " ")
    .replace(/\\(begin|end)\{\w+\*?\}|\\[^a-zA-Z]|[{}&]/g, " ")
    .replace(/\\([a-zA-Z]+)/g, " $1 ")
    .replace(/\s+/g, " ");
addEventListener("DOMContentLoaded", () => {
  if (typeof Search === "undefined") return; // only the page of the search has it
  const raw = Search.htmlToText;
  Search.htmlToText = (html, anchor) => {
    const page = new DOMParser().parseFromString(html, "text/html");
    page.querySelectorAll(".math").forEach((math) => (math.textContent = spoken(math.textContent)));
    return raw(page.documentElement.outerHTML, anchor);
  };
});
addEventListener("load", () => {
  const narrow = 0.72; // smaller nobody reads: then it scrolls, and its edge shows it
  const fit = () => {
    document.querySelectorAll("main div.math").forEach((math) => {
      math.style.fontSize = "";
      math.classList.remove("wide");
      const drawn = math.querySelector("mjx-container") ?? math; // the wider of the two scrolls
      const ratio = Math.min(drawn.clientWidth / drawn.scrollWidth, math.clientWidth / math.scrollWidth);
      if (ratio < 1) math.style.fontSize = `${Math.max(narrow, 0.97 * ratio)}em`;
      math.classList.toggle("wide", drawn.scrollWidth > drawn.clientWidth + 1 || math.scrollWidth > math.clientWidth + 1);
    });
  };
  window.MathJax?.startup?.promise?.then(fit);
  addEventListener("resize", fit);

  // The navigation shows where one is.
  const here = document.querySelector(".bd-sidebar-primary li.current.active");
  const bar = here?.closest(".bd-sidebar-primary");
  if (bar) bar.scrollTop += here.getBoundingClientRect().top - bar.getBoundingClientRect().top - bar.clientHeight / 2;

  // The list of contents follows the page.
  const contents = document.querySelector(".bd-sidebar-secondary");
  addEventListener("activate.bs.scrollspy", () => {
    const [mark, frame] = [contents?.querySelector(".nav-link.active"), contents].map((e) => e?.getBoundingClientRect());
    if (mark && (mark.top < frame.top || mark.bottom > frame.bottom)) contents.scrollTop += mark.top - frame.top - frame.height / 2;
  });

  // A tap on a figure of a narrow window shows it on the whole of it, as large as it was drawn.
  const shown = Object.assign(document.createElement("dialog"), { className: "whole" });
  shown.addEventListener("click", () => shown.close());
  document.querySelectorAll("a.figure-link").forEach((link) =>
    link.addEventListener("click", (event) => {
      if (innerWidth > 600 || !shown.showModal) return;
      event.preventDefault();
      const close = Object.assign(document.createElement("button"), { textContent: "Close" });
      shown.replaceChildren(close, ...[...link.children].map((image) => image.cloneNode(true)));
      document.body.append(shown);
      shown.showModal();
    })
  );

  // A link to a check opens what it stands in.
  const open = () => {
    const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    const closed = target && target.closest("details:not([open])");
    if (!closed) return;
    closed.open = true;
    target.scrollIntoView();
  };
  addEventListener("hashchange", open);
  open();

  // Figures to move need libraries of 160 kB: they are fetched, in this order, when one comes near the window or paper.
  const fetched = () => {
    near.disconnect();
    removeEventListener("beforeprint", fetched);
    for (const name of ["d3.min.js", "plot.umd.min.js", "t5.js", "trained.js", "explore.js"]) {
      const script = Object.assign(document.createElement("script"), { src: `_static/explore/${name}`, async: false });
      document.head.append(script);
    }
  };
  const seen = (all) => all.some((each) => each.isIntersecting) && fetched();
  const near = new IntersectionObserver(seen, { rootMargin: "100% 0px" });
  const explorables = document.querySelectorAll("div.explore");
  explorables.forEach((div) => near.observe(div));
  if (explorables.length) addEventListener("beforeprint", fetched);
  if (location.search === "?print") fetched(); // a printer without a window does not wait for them
});
