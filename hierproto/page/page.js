'use strict';
// The numbers come as JSON. Names are set as text, never as HTML.
const $ = id => document.getElementById(id);
const data = JSON.parse($('data').textContent);
const percent = x => (100 * x).toFixed(0) + '%', round = x => +x.toPrecision(4);

function add(parent, tag, attrs = {}, text) {
  const svg = tag === 'svg' || parent.namespaceURI.endsWith('svg');
  const e = svg ? document.createElementNS('http://www.w3.org/2000/svg', tag) : document.createElement(tag);
  for (const [k, v] of Object.entries(attrs)) e.setAttribute(k, v);
  if (text !== undefined) e.textContent = text;
  parent.append(e);
  return e;
}
function addImages(parent, key) {
  for (const [file, src] of data.images[key] || []) add(parent, 'img', {src, alt: file, title: file});
}

// Costly mistakes: a click on a header sorts, a second click the other way round.
function drawMistakes(rows) {
  for (const [key, level, ...values] of rows) {
    const row = add($('costly').tBodies[0], 'tr', {'data-level': level});
    for (const v of values) add(row, 'td', {}, typeof v === 'number' ? round(v) : v);
    addImages(add(row, 'td'), key);
  }
  [...$('costly').tHead.rows[0].cells].forEach((th, i) => {
    th.tabIndex = 0;
    th.onclick = () => sortBy($('costly'), i);
    th.onkeydown = e => e.key === 'Enter' && sortBy($('costly'), i);
  });
  data.levels.forEach((name, l) => add($('level'), 'option', {value: l + 1}, 'wrong from ' + name + ' on'));
  $('level').hidden = data.levels.length < 2;
  $('level').onchange = () => {
    for (const e of document.querySelectorAll('#cells rect[data-level], #costly tbody tr'))
      e.classList.toggle('off', $('level').value !== '0' && e.dataset.level !== $('level').value);
  };
}
function sortBy(table, i) {
  const heads = [...table.tHead.rows[0].cells], rows = [...table.tBodies[0].rows];
  const down = heads[i].getAttribute('aria-sort') !== 'descending';
  heads.forEach(h => h.removeAttribute('aria-sort'));
  heads[i].setAttribute('aria-sort', down ? 'descending' : 'ascending');
  const value = row => row.cells[i].textContent, number = rows.every(r => value(r) !== '' && !isNaN(value(r)));
  rows.sort((a, b) => number ? value(a) - value(b) : value(a).localeCompare(value(b)));
  table.tBodies[0].append(...(down ? rows.reverse() : rows));
}

// The matrix: a click shows the images of a cell.
function drawMatrix({names, rows, cells}) {
  const labels = names.length <= 40, short = names.map(o => o.length > 18 ? o.slice(0, 17) + '…' : o);
  const m = labels ? 1 + .36 * Math.max(...short.map(o => o.length)) : 0;
  const size = names.length + m, style = `max-width:${Math.min(46, 2 * size)}rem`;
  const svg = add($('cells'), 'svg', {viewBox: `${-m} ${-m} ${size} ${rows + m}`, style});
  add(svg, 'rect', {width: names.length, height: rows, class: 'empty', 'pointer-events': 'none'});
  if (labels) short.forEach((name, i) => {
    if (i < rows) add(svg, 'text', {x: -.3, y: i + .7, 'text-anchor': 'end'}, name);
    add(svg, 'text', {transform: `translate(${i + .7} -.3) rotate(-90)`}, name);
  });
  const most = f => cells.reduce((a, c) => Math.max(a, f(c)), 1e-9), right = c => c[0] === c[1];
  const top = [most(c => right(c) ? 0 : c[2]), most(c => right(c) ? c[2] : 0)], cost = most(c => c[3]);
  cells.forEach((c, i) => {
    const fill = right(c) ? '#789' : `hsl(${45 - 45 * c[3] / cost} 85% 50%)`, opacity = .2 + .8 * Math.sqrt(c[2] / top[+right(c)]);
    const attrs = {x: c[1], y: c[0], width: 1, height: 1, fill, opacity, 'data-i': i, 'data-level': c[4]};
    add(add(svg, 'rect', attrs), 'title', {}, about(c));
  });
  function about([row, column, times, each, level]) {
    if (row === column) return `${names[row]}: ${times} times right`;
    const from = data.levels.length > 1 ? `, wrong from ${data.levels[level - 1]} on` : '';
    return `${names[row]} taken for ${names[column]}: ${times} times, cost ${round(each)} each${from}`;
  }
  svg.onclick = ({target}) => {
    if (!target.dataset.i) return;
    document.querySelector('.chosen')?.classList.remove('chosen');
    target.classList.add('chosen');
    $('cell').replaceChildren();
    const c = cells[target.dataset.i];
    add($('cell'), 'p', {}, about(c));
    addImages($('cell'), c[0] + '-' + c[1]);
  };
}

// The certainty that an answer needs: everything was computed before, the slider looks it up.
function drawCurve(curve) {
  const svg = add($('lines'), 'svg', {viewBox: '-12 -3 116 64', style: 'font-size:4px'});
  for (const y of [0, .5, 1]) {
    add(svg, 'path', {d: `M0 ${50 - 50 * y}H100`, class: 'grid'});
    add(svg, 'text', {x: -1, y: 51 - 50 * y, 'text-anchor': 'end'}, percent(y));
  }
  [['answers that are right', 'var(--blue)'], ['answers that name a class', 'var(--red)']].forEach(([name, colour], i) => {
    const points = curve.map(o => `${100 * o[0]},${50 - 50 * o[i + 1]}`).join(' ');
    add(svg, 'polyline', {points, style: `stroke:${colour}`, fill: 'none', 'stroke-width': .8});
    add(svg, 'text', {x: 50 * i, y: 58, style: `fill:${colour}`}, name);
  });
  const line = add(svg, 'path', {d: 'M0 0V50', stroke: 'currentColor', 'stroke-width': .5});
  $('certainty').oninput = () => {
    const [t, right, classes, cost] = curve[$('certainty').value];
    line.setAttribute('transform', `translate(${100 * t} 0)`);
    $('certain').textContent = `Certainty ${percent(t)}: ${percent(right)} of the answers are right, ` +
      `${percent(classes)} name a class, the others a group. Average cost ${cost.toFixed(3)}.`;
  };
  $('certainty').oninput();
}

function drawTree([name, wrong, total, kids], parent) {
  const item = add(parent, 'li'), fold = kids.length ? add(item, 'details', {open: ''}) : item;
  add(add(fold, kids.length ? 'summary' : 'span', {}, name), 'small', {}, ` ${wrong} of ${total} wrong`);
  const list = kids.length && add(fold, 'ul');
  for (const kid of kids) drawTree(kid, list);
}

// The cost as given (a line) among those with the classes shuffled (bars).
function drawFit({says, true: cost, ends: [low, high], bars}) {
  document.querySelector('#fit .says').textContent = says;
  const most = Math.max(...bars), width = 100 / bars.length, at = 100 * (cost - low) / (high - low);
  if (most === bars.reduce((a, b) => a + b)) return; // all the same
  const svg = add($('shuffled'), 'svg', {viewBox: '-6 -8 112 54', style: 'font-size:4px'});
  bars.forEach((n, i) => add(svg, 'rect', {x: i * width, y: 40 - 40 * n / most, width: .9 * width, height: 40 * n / most, fill: '#789'}));
  add(svg, 'path', {d: `M${at} -2V40`, style: 'stroke:var(--red)', 'stroke-width': .8});
  add(svg, 'text', {x: at, y: -3, style: 'fill:var(--red)', 'text-anchor': at < 50 ? 'start' : 'end'}, `as given: ${cost.toFixed(2)}`);
  for (const [x, v] of [[0, low], [100, high]]) add(svg, 'text', {x, y: 45, 'text-anchor': 'middle'}, v.toFixed(2));
  add(svg, 'text', {x: 50, y: 45, 'text-anchor': 'middle'}, 'average cost, classes shuffled');
}

const draw = {mistakes: drawMistakes, matrix: drawMatrix, curve: drawCurve, fit: drawFit, tree: root => drawTree(root, add($('tree'), 'ul'))};
for (const [id, f] of Object.entries(draw)) if (data[id] && $(id)) f(data[id]);
if ($('fold')) $('fold').onclick = () => {
  const all = [...document.querySelectorAll('#tree details')], open = all.some(o => o.open);
  all.forEach(o => o.open = !open);
};
