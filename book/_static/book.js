// Small things that style sheets cannot do. Without scripts wide equations scroll, and closed checks open by a click.
addEventListener("load", () => {
  const narrow = 0.72; // smaller nobody reads: then it scrolls
  const fit = () => {
    if (innerWidth < 1000) return; // on a phone equations scroll inside themselves
    document.querySelectorAll("main div.math").forEach((math) => {
      math.style.fontSize = "";
      const drawn = math.querySelector("mjx-container") ?? math; // the wider of the two scrolls
      const ratio = Math.min(drawn.clientWidth / drawn.scrollWidth, math.clientWidth / math.scrollWidth);
      if (ratio < 1) math.style.fontSize = `${Math.max(narrow, 0.99 * ratio)}em`;
    });
  };
  window.MathJax?.startup?.promise?.then(fit);
  addEventListener("resize", fit);

  // The navigation shows where one is.
  const here = document.querySelector(".bd-sidebar-primary li.current.active");
  const bar = here?.closest(".bd-sidebar-primary");
  if (bar) bar.scrollTop += here.getBoundingClientRect().top - bar.getBoundingClientRect().top - bar.clientHeight / 2;

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
    for (const name of ["d3.min.js", "plot.umd.min.js", "t5.js", "explore.js"]) {
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
