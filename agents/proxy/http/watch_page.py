"""A page to watch the proxy by: what /healthz says, every two seconds. It loads nothing from elsewhere."""

PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>turngym proxy</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em; max-width: 60em; color: #222; background: #fff }
h1 { font-size: 1.2em } h2 { font-size: 1em; margin: 1.2em 0 .2em; text-transform: capitalize }
table { border-collapse: collapse } td { padding: .1em 1em .1em 0 } td + td { text-align: right }
@media (prefers-color-scheme: dark) { body { color: #ddd; background: #181818 } }
</style>
<h1>turngym proxy <span id="state"></span></h1><div id="all"></div>
<script>
function table(title, rows) {
  const made = name => document.createElement(name);
  const box = made('div'), head = made('h2'), body = made('table');
  head.textContent = title;
  for (const [name, value] of rows) {
    const row = body.insertRow();
    row.insertCell().textContent = name.replaceAll('_', ' ');
    row.insertCell().textContent = typeof value === 'number' ? +value.toFixed(3) : String(value);
  }
  box.append(head, body);
  return box;
}
async function look() {
  try {
    const health = await (await fetch('/healthz')).json(), entries = Object.entries(health);
    const plain = entries.filter(([, value]) => typeof value !== 'object');
    const nested = entries.filter(([, value]) => value && typeof value === 'object' && Object.keys(value).length);
    document.getElementById('state').textContent = health.status;
    const shown = [table('now', plain), ...nested.map(([name, value]) => table(name, Object.entries(value)))];
    document.getElementById('all').replaceChildren(...shown);
  } catch (error) { document.getElementById('state').textContent = 'is not reached'; }
}
look(); setInterval(look, 2000);
</script></html>
"""
