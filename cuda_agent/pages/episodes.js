"use strict";
// Searches, filters and sorts the episodes of the page. Nothing is loaded, and no text of the page becomes code or HTML.
(() => {
  const at = (id) => document.getElementById(id);
  const list = at("cards");
  if (!list) return;
  const cards = [...list.children];
  const words = new Map();
  const text = (card) => {
    if (!words.has(card)) words.set(card, card.textContent.toLowerCase());
    return words.get(card);
  };
  const number = (card, name) => (name in card.dataset ? Number(card.dataset[name]) : -Infinity);

  const show = () => {
    const search = at("search").value.trim().toLowerCase();
    const least = at("least").value === "" ? -Infinity : Number(at("least").value);
    let shown = 0;
    for (const card of cards) {
      const fits = ["stage", "status", "ended"].every((name) => !at(name).value || card.dataset[name] === at(name).value);
      card.hidden = !(fits && number(card, "reward") >= least && (!search || text(card).includes(search)));
      shown += !card.hidden;
    }
    at("count").textContent = `${shown} of ${cards.length}`;
  };
  const sort = () => {
    const name = at("sort").value;
    const order = [...cards];
    if (name) order.sort((one, other) => number(other, name) - number(one, name));
    list.append(...order);
  };
  const reveal = () => {
    const target = location.hash && at(decodeURIComponent(location.hash.slice(1)));
    const card = target && target.closest("article");
    if (!card) return;
    card.hidden = false;
    card.querySelector("details").open = true;
    target.scrollIntoView();
  };

  for (const id of ["search", "least", "stage", "status", "ended"]) at(id).addEventListener("input", show);
  at("sort").addEventListener("input", sort);
  addEventListener("hashchange", reveal);
  at("controls").hidden = false;
  show();
  reveal();
})();
