// Sorts and filters the table of claims. Without scripts the table stands as it is.
// The address holds the filters, so that pages can link to some claims: scorecard.html?verdict=refuted#all-claims
document.addEventListener("DOMContentLoaded", () => {
  const table = document.querySelector(".claims-table");
  if (!table) return;
  const rows = [...table.tBodies[0].rows];
  const key = (row, column) => row.cells[column].dataset.sort;
  const compare = (a, b, column) => key(a, column).localeCompare(key(b, column), "en", { numeric: true });
  const verdicts = [...new Set([...rows].sort((a, b) => compare(a, b, 0)).map((row) => row.dataset.verdict))];
  const objects = [...new Set(rows.flatMap((row) => row.dataset.objects.split("|")))];
  const chapters = [...new Set(rows.flatMap((row) => row.dataset.chapters.split(" ")))].sort((a, b) => a - b);

  const form = document.createElement("form");
  form.className = "claims-filter";
  form.setAttribute("role", "search");
  form.setAttribute("aria-label", "Filter the claims");
  const field = (name, element, shown = name[0].toUpperCase() + name.slice(1)) => {
    const label = document.createElement("label");
    label.append(`${shown} `, element);
    element.name = name;
    form.append(label);
    return element;
  };
  const select = (name, values, shown) => {
    const element = document.createElement("select");
    element.add(new Option("all", ""));
    values.forEach((value) => element.add(new Option(value, value)));
    return field(name, element, shown);
  };
  const verdict = select("verdict", verdicts);
  const asked = select("asked", ["the paper", "us"], "Asked by");
  const object = select("object", objects, "Rests on");
  const chapter = select("chapter", chapters);
  const text = field("text", Object.assign(document.createElement("input"), { type: "search" }));
  const all = Object.assign(document.createElement("button"), { type: "reset", textContent: "Show all" });
  const status = document.createElement("p");
  status.setAttribute("role", "status");
  form.append(all, status);
  table.before(form);

  const filter = () => {
    const words = text.value.toLowerCase().split(/\s+/).filter(Boolean);
    rows.forEach((row) => {
      const content = row.textContent.toLowerCase();
      row.hidden =
        (chapter.value && !row.dataset.chapters.split(" ").includes(chapter.value)) ||
        (verdict.value && row.dataset.verdict !== verdict.value) ||
        (asked.value && row.dataset.asked !== asked.value) ||
        (object.value && !row.dataset.objects.split("|").includes(object.value)) ||
        !words.every((word) => content.includes(word));
    });
    const shown = rows.filter((row) => !row.hidden);
    const counts = verdicts.map((name) => [shown.filter((row) => row.dataset.verdict === name).length, name]);
    const told = counts.filter(([count]) => count).map((pair) => pair.join(" "));
    status.textContent = shown.length
      ? `${shown.length} of ${rows.length} claims shown: ${told.join(", ")}`
      : `No claim fits all of this. “Show all” brings back the ${rows.length} claims.`;
  };
  const toAddress = () => {
    const address = new URL(location);
    [verdict, asked, object, chapter, text].forEach((element) => {
      if (element.value) address.searchParams.set(element.name, element.value);
      else address.searchParams.delete(element.name);
    });
    history.replaceState(null, "", address);
  };
  const fromAddress = () => {
    const sought = new URLSearchParams(location.search);
    [verdict, asked, object, chapter].forEach((element) => {
      const value = sought.get(element.name);
      if ([...element.options].some((option) => option.value === value)) element.value = value;
    });
    text.value = sought.get("text") || "";
  };
  const changed = () => {
    filter();
    toAddress();
  };
  form.addEventListener("input", changed);
  form.addEventListener("reset", () => setTimeout(changed)); // after the fields are empty
  form.addEventListener("submit", (event) => event.preventDefault());

  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const button = Object.assign(document.createElement("button"), { type: "button", textContent: head.textContent });
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const up = head.getAttribute("aria-sort") !== "ascending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      table.tBodies[0].append(...[...rows].sort((a, b) => (up ? 1 : -1) * compare(a, b, column)));
    });
  });
  fromAddress();
  filter();
});
