// Where ranks wait for ever: their open blocks with what they wait for, and arrows that form the cycle.

// Blocks begin behind a rank's last action and have no end; arrows stand beside their words.
function paintHang(pen, layer, scale, top) {
  const { waits, arrows, carriedOut } = layer.hang;
  // Arrows have the last part of the time beyond all actions.
  const last = Math.min(0.4, 0.08 * (arrows.length + 1)) * (layer.makespan - carriedOut);
  const bar = rows.bars.find(candidate => candidate.layer === layer);
  for (const wait of waits) {
    const box = barBox(bar, wait.rank, top), left = scale.x(wait.start), right = scale.x(layer.makespan);
    if (right < 0 || left > scale.width) continue;
    pen.fillStyle = css(colours.wait);
    pen.fillRect(left, box.y, right - left, box.height);
    pen.fillStyle = colours.waitHatch;
    pen.fillRect(left, box.y, right - left, box.height);
    pen.strokeStyle = css(colours.alarm);
    pen.lineWidth = 1.25;
    pen.beginPath();
    pen.moveTo(right, box.y);
    pen.lineTo(left, box.y);
    pen.lineTo(left, box.y + box.height);
    pen.lineTo(right, box.y + box.height);
    pen.stroke();
    const crossed = arrows.some(ends => Math.min(...ends) <= wait.rank && wait.rank <= Math.max(...ends));
    const end = crossed ? scale.x(layer.makespan - last) : right;
    paintWait(pen, wait, box, Math.max(0, left), Math.min(scale.width, end));
  }
  arrows.forEach(([rank, awaited], i) => {
    const x = scale.x(layer.makespan - last * (1 - (i + 0.5) / arrows.length));
    const middle = place => (box => box.y + box.height / 2)(barBox(bar, place, top));
    paintArrow(pen, { x, y: middle(rank) }, { x, y: middle(awaited) }, colours.alarm);
  });
}

// The wait in words, in one line or two, where they fit between two places.
function paintWait(pen, wait, box, left, right) {
  const middle = wait.told.indexOf(" waits for ") + " waits for".length;
  const two = [wait.told.slice(0, middle), wait.told.slice(middle + 1)];
  pen.textAlign = "left";
  pen.textBaseline = "middle";
  const widest = own => Math.max(...own.map(line => pen.measureText(line).width));
  const ways = [[[wait.told], 12], [two, 12], [[wait.told], 10], [two, 10]];
  const found = ways.find(([own, height]) => {
    pen.font = `${height}px system-ui, "Liberation Sans", sans-serif`;
    return widest(own) + 10 <= right - left && own.length * 1.2 * height <= box.height;
  });
  if (!found) return;
  const [fitting, size] = found;
  pen.fillStyle = css(colours.wait);
  pen.beginPath();
  pen.roundRect(left + 4, box.y + box.height / 2 - (fitting.length * 1.2 * size) / 2 - 1, widest(fitting) + 6, fitting.length * 1.2 * size + 2, 3);
  pen.fill();
  pen.fillStyle = css(colours.alarm);
  fitting.forEach((line, i) => pen.fillText(line, left + 7, box.y + box.height / 2 + (i - (fitting.length - 1) / 2) * 1.2 * size));
}

const waitOf = (layer, rank) => layer.hang?.waits.find(wait => wait.rank === rank);

// The sentence of the proof in place of figures, which nothing that hangs has.
function tellHang() {
  const told = layers.filter(layer => layer.hang).map(layer => layer.hang.sentence);
  $("hang").hidden = !told.length;
  $("hang").textContent = told.join("; ");
  $("byRank").hidden = $("definitions").hidden = $("figures").hidden = told.length > 0;
}
