// Sorts and filters the table of claims. Without scripts the table stands as it is.
document.addEventListener("DOMContentLoaded", () => {
  const table = document.querySelector(".claims-table");
  if (!table) return;
  const rows = [...table.tBodies[0].rows];

  const form = document.createElement("form");
  form.className = "claims-filter";
  form.setAttribute("role", "search");
  form.setAttribute("aria-label", "Filter the claims");
  const field = (label, element) => {
    const wrap = document.createElement("label");
    wrap.append(label + " ", element);
    form.append(wrap);
    return element;
  };
  const select = (label, values) => {
    const element = document.createElement("select");
    element.add(new Option("all", ""));
    values.forEach((value) => element.add(new Option(value, value)));
    return field(label, element);
  };
  const chapters = new Set(rows.flatMap((row) => row.dataset.chapters.split(" ")));
  const chapter = select("Chapter", [...chapters].sort((a, b) => a - b));
  const verdict = select("Verdict", [...new Set(rows.map((row) => row.dataset.verdict))].sort());
  const text = field("Text", Object.assign(document.createElement("input"), { type: "search" }));
  const status = document.createElement("p");
  status.setAttribute("role", "status");

  const filter = () => {
    const words = text.value.toLowerCase().split(/\s+/).filter(Boolean);
    rows.forEach((row) => {
      const content = row.textContent.toLowerCase();
      row.hidden =
        (chapter.value && !row.dataset.chapters.split(" ").includes(chapter.value)) ||
        (verdict.value && row.dataset.verdict !== verdict.value) ||
        !words.every((word) => content.includes(word));
    });
    status.textContent = `${rows.filter((row) => !row.hidden).length} of ${rows.length} claims shown`;
  };
  form.addEventListener("input", filter);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.append(status);
  table.parentElement.before(form);

  [...table.tHead.rows[0].cells].forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = head.textContent;
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const up = head.getAttribute("aria-sort") !== "ascending";
      [...table.tHead.rows[0].cells].forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const key = (row) => row.cells[column].dataset.sort;
      const compare = (a, b) => key(a).localeCompare(key(b), "en", { numeric: true });
      table.tBodies[0].append(...[...rows].sort((a, b) => (up ? compare(a, b) : compare(b, a))));
    });
  });
  filter();
});
