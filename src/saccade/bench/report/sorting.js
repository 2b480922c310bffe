// Sorting: a header's button sorts its column, once more the other way round. Rows without a
// number come last either way; rows that are equal keep their order. A cell's number is what its
// text begins with, alone or before a slash, unless it says another, or with "" that it has none.

const sorting = {
  key(row, column) {
    const cell = row.cells[column];
    const number = cell.dataset.number ?? cell.textContent.match(/^\d+(?= \/|$)/)?.[0];
    return number ? Number(number) : null;
  },

  compare(column, numeric, sign) {
    return (one, other) => {
      if (!numeric) {
        const texts = [one, other].map((row) => row.cells[column].textContent);
        return sign * texts[0].localeCompare(texts[1], "en", { numeric: true });
      }
      const [left, right] = [sorting.key(one, column), sorting.key(other, column)];
      if (left === null || right === null) return (left === null) - (right === null);
      return sign * (left - right);
    };
  },

  sort(header) {
    const table = header.closest("table"), body = table.tBodies[0], rows = [...body.rows];
    const ascending = header.getAttribute("aria-sort") !== "ascending";
    for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
    header.setAttribute("aria-sort", ascending ? "ascending" : "descending");
    const column = header.cellIndex, numeric = header.classList.contains("number");
    body.append(...rows.sort(sorting.compare(column, numeric, ascending ? 1 : -1)));
  },
};

// One listener for all tables: those that charts make later sort as well.
document.addEventListener("click", (event) => {
  const button = event.target.closest("table.sortable thead button");
  if (button) sorting.sort(button.closest("th"));
});
