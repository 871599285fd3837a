for (const table of document.querySelectorAll("table")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    head.tabIndex = 0;
    const sort = () => {
      const down = head.getAttribute("aria-sort") !== "descending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const key = (row) => row.cells[column].dataset.v ?? row.cells[column].textContent;
      const order = (a, b) => (isNaN(a) || isNaN(b) ? a.localeCompare(b) : a - b);
      const rows = [...table.tBodies[0].rows].sort((a, b) => order(key(a), key(b)) * (down ? -1 : 1));
      table.tBodies[0].append(...rows);
    };
    head.addEventListener("click", sort);
    head.addEventListener("keydown", (event) => event.key === "Enter" && sort());
  });
}
