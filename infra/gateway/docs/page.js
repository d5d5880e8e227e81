"use strict";
// Lists what each service offers, from its own OpenAPI document.
const METHODS = ["get", "post", "put", "patch", "delete"];

function row(...cells) {
  const line = document.createElement("tr");
  for (const text of cells) {
    line.insertCell().textContent = text;
  }
  return line;
}

async function list(section) {
  const answer = await fetch(`${section.id}/openapi.json`);
  if (!answer.ok) {
    throw new Error(`HTTP ${answer.status}`);
  }
  const table = document.createElement("table");
  for (const [path, operations] of Object.entries((await answer.json()).paths)) {
    // The gateway passes on /v1 alone; health and metrics are for the inside.
    for (const method of path.startsWith("/v1/") ? METHODS : []) {
      if (operations[method]) {
        const open = operations[method].security ? "" : " (open)";
        table.append(row(method.toUpperCase(), path, (operations[method].summary ?? "") + open));
      }
    }
  }
  section.append(table);
}

for (const section of document.querySelectorAll("section")) {
  list(section).catch((error) => {
    const line = document.createElement("p");
    line.className = "away";
    line.textContent = `The service does not answer now (${error.message}).`;
    section.append(line);
  });
}
