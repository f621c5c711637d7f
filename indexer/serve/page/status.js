// The status page: fetch /status.json every few seconds and show it. All texts are set with textContent, because they
// may come from other hosts; nothing here makes HTML from a string.

import { Chart } from "./charts.js";
import { ago, bytes, clock, count, duration, percent, plural, rate, text, whole } from "./format.js";

const POLL_SECONDS = 5;
const REQUEST_SECONDS = 10;

const element = (id) => document.getElementById(id);
const charts = {
  lag_seconds: new Chart(element("chart-lag"), duration, 1),
  messages_per_second: new Chart(element("chart-messages"), rate, 1),
  resyncs_per_second: new Chart(element("chart-resyncs"), rate, 1),
};
let lastAnswer = null;
let timer = null;

function setText(node, value) {
  if (node.textContent !== value) node.textContent = value; // an unchanged text keeps its selection
}

function set(id, value) {
  setText(element(id), value);
}

/** Show rows in a table. A cell is a text, or {did} for a button that looks the account up. */
function fill(id, rows) {
  const table = element(id);
  const labels = [...table.tHead.rows[0].cells].map((cell) => [cell.textContent, cell.className]);
  const body = table.tBodies[0];
  while (body.rows.length > rows.length) body.deleteRow(-1);
  rows.forEach((cells, index) => {
    const row = body.rows[index] ?? newRow(body, labels);
    cells.forEach((cell, column) => setCell(row.cells[column], cell));
  });
  table.hidden = rows.length === 0;
  table.parentElement.querySelector(".empty").hidden = rows.length > 0;
  table.parentElement.classList.toggle("is-empty", rows.length === 0);
}

function newRow(body, labels) {
  const row = body.insertRow();
  row.setAttribute("role", "row"); // the narrow layout takes the native roles away
  for (const [label, className] of labels) {
    const cell = row.insertCell();
    cell.setAttribute("role", "cell");
    cell.dataset.label = label;
    cell.className = className;
  }
  return row;
}

function setCell(cell, value) {
  const did = value?.did;
  if (!did) {
    setText(cell, value?.did === null ? "–" : value);
    return;
  }
  let button = cell.querySelector("button");
  if (button === null) {
    button = document.createElement("button");
    button.type = "button";
    button.className = "account";
    button.title = "Look up this account";
    button.addEventListener("click", () => lookUp(button.textContent));
    cell.replaceChildren(button);
  }
  setText(button, did);
}

const more = (shown, all) => (all > shown ? `${whole(shown)} of ${whole(all)}` : "");

/** Say which parts other processes have on pages of their own, if there are other processes. */
function showScope({ shard, roles }) {
  element("scope").hidden = shard === "0/1" && roles.length === 2;
  set("scope", `Readiness, charts, lag, messages, resyncs and conditions are those of this process only (shard ${shard}, ${roles.join(" and ")}); `
    + "the other processes have pages of their own. Repos, links, gaps, paused hosts, dead letters and consumers are those of the whole database.");
}

function showReadiness(status) {
  const lag = status.process.stream.lag_seconds;
  const stored = lag === null ? "no message is stored yet" : `everything up to ${duration(lag)} ago is stored`;
  element("readiness").className = `banner ${status.ready ? "good" : "bad"}`;
  const [first] = status.reasons;
  set("headline", status.ready ? `Ready: ${stored}.` : `Not ready: ${first.message}`);
  const list = element("reasons");
  list.hidden = status.reasons.length < 2;
  const rest = status.reasons.slice(1).map((reason) => {
    const item = document.createElement("li");
    item.textContent = reason.message;
    return item;
  });
  list.replaceChildren(...rest);
  document.title = `${status.ready ? "ready" : "NOT READY"} · indexer`;
}

/** Show the state of links, unless they are off. */
function showLinks(links) {
  const shown = links !== null && links.state !== "off";
  element("links-tile").hidden = !shown;
  if (!shown) return;
  set("links", percent(links.progress));
  set("links-note", links.state === "backfill" ? `backfill, time left: ${duration(links.seconds_left)}` : "complete");
}

/** Show how many repos wait for the records of added collections, unless none does. */
function showScopeBackfill(repos) {
  const backfill = repos?.scope_backfill;
  const waiting = backfill?.waiting ?? 0;
  element("scope-tile").hidden = waiting === 0;
  if (waiting === 0) return;
  set("scope-waiting", `${repos.counted_share < 1 ? "about " : ""}${count(waiting)}`);
  const speed = backfill.repos_per_second === null ? "" : `, ${rate(backfill.repos_per_second)}`;
  set("scope-note", `repos wait for added collections${speed}; time left: ${duration(backfill.seconds_left)}`);
}

function showTiles({ repos, process: { stream, resyncs, history } }) {
  set("lag", duration(stream.lag_seconds));
  set("lag-note", `${count(stream.unsettled_messages)} in work, ${bytes(stream.unsettled_bytes)}`
    + (stream.waiting_for_keys ? `; waiting for keys: ${whole(stream.waiting_for_keys)}` : ""));
  set("messages", rate(history.messages_per_second.at(-1) ?? null));
  const silent = stream.silent_seconds === null ? "none yet" : `last one ${ago(stream.silent_seconds)}`;
  set("messages-note", stream.relay === null ? `no relay is connected, ${silent}` : silent);
  const backfill = repos?.backfill;
  set("progress", percent(repos?.progress));
  const about = repos && repos.counted_share < 1 ? "about " : "";
  set("progress-note", repos ? `repos: ${about}${count(repos.statuses.synchronized)}` : "not counted yet");
  set("time-left", backfill?.waiting === 0 ? "done" : duration(backfill?.seconds_left));
  set("time-left-note", backfill ? `${about}${count(backfill.waiting)} waiting, ${rate(backfill.repos_per_second)}` : "not counted yet");
  set("running", whole(resyncs.running));
  const free = resyncs.workers_free === null ? "no workers in this process" : `${plural(Math.max(0, resyncs.workers_free), "worker")} free`;
  set("running-note", `${rate(history.resyncs_per_second.at(-1) ?? null)}, ${free}`);
  set("records", count(repos?.records));
}

/** The number of repos, with a word if it is an estimate. */
const estimate = (repos, number) => (repos.counted_share === 1 ? whole(number) : `about ${count(number)}`);

function showRepos(repos) {
  const states = ["synchronized", "in-progress", "desynchronized"];
  const shown = (number) => estimate(repos, number);
  const named = (prefix, counts) => Object.entries(counts).map(([name, number]) => [`${prefix}: ${name}`, shown(number)]);
  fill("repos", repos ? [
    ...states.map((state) => [state, shown(repos.statuses[state])]),
    ["waiting in the resync queue", shown(repos.queued)],
    ["parked until a message arrives", shown(repos.parked)],
    ...(repos.unproven ? [["unproven", shown(repos.unproven)]] : []),
    ...named("reason", repos.reasons),
    ...named("last error", repos.failures),
  ] : []);
  element("repos-bar").value = repos?.progress ?? 0;
  const part = repos && repos.counted_share < 1 ? `estimated from ${percent(repos.counted_share)} of the table` : "counted";
  set("repos-note", repos ? `${part} ${ago(repos.counted_seconds_ago)}` : "");
}

function showResyncs({ longest, running }) {
  const slots = { worker: "", large: ", large repo" };
  fill("resyncs", longest.map((resync) => [
    { did: resync.did }, resync.host || "not known yet", `${resync.phase} for ${duration(resync.phase_seconds)}${slots[resync.slot]}`,
    bytes(resync.received_bytes), resync.bytes_per_second === null ? "–" : `${bytes(resync.bytes_per_second)}/s`, duration(resync.seconds),
  ]));
  set("resyncs-note", more(longest.length, running));
}

function showTrouble(status) {
  fill("hosts", status.hosts.map((host) => [
    host.host, `${host.reason} for ${duration(host.seconds_left)}`,
    whole(host.failures_in_a_row), ago(host.last_success_seconds_ago), text(host.last_error),
  ]));
  fill("withheld", status.withheld.map((host) => [
    host.host, whole(host.not_passed_on), whole(host.at_relay), whole(host.repos), whole(host.synchronized), ago(host.listed_seconds_ago),
  ]));
  fill("conditions", status.process.conditions.map((condition) => [
    `${condition.name} ${condition.subject}`.trim(), ago(condition.seconds), condition.count ? whole(condition.count) : "–", condition.message,
  ]));
  fill("streams", status.process.streams.map((stream) => [
    stream.relay, stream.trouble ?? "connected",
    duration(stream.lag_seconds), ago(stream.silent_seconds), whole(stream.missing_messages), whole(stream.seq),
  ]));
  fill("gaps", status.gaps.map((gap) => [gap.relay, gap.reason, whole(gap.first_seq), whole(gap.last_seq), duration(gap.open_seconds)]));
  set("gaps-note", status.read_seconds_ago === null ? "not known yet" : more(status.gaps.length, status.gaps_open));
}

function showDelivery({ rejections, consumers, read_seconds_ago: age }) {
  fill("rejections", rejections.map((rejection) => [
    rejection.reason, whole(rejection.last_hour), whole(rejection.stored), ago(rejection.newest_seconds_ago),
    { did: rejection.did }, rejection.detail || rejection.meaning,
  ]));
  fill("consumers", consumers.map((consumer) => [
    consumer.name, consumer.cut_off ? "disconnected: register it again" : "following", duration(consumer.lag_seconds),
    whole(consumer.behind), whole(consumer.seq), ago(consumer.silent_seconds),
  ]));
  set("rejections-note", age === null ? "not read yet" : `read ${ago(age)}`);
}

function show(status) {
  const { process } = status;
  set("version", status.version);
  set("process", `${process.stream.relay ?? "no relay"} · shard ${process.shard} · ${process.roles.join(", ")} · up ${duration(process.time - process.started_at)}`);
  showScope(process);
  showReadiness(status);
  showTiles(status);
  showLinks(status.links);
  showScopeBackfill(status.repos);
  showRepos(status.repos);
  showResyncs(process.resyncs);
  showTrouble(status);
  showDelivery(status);
  element("loading").hidden = true;
  element("main").hidden = false; // before the charts, which measure their width
  for (const [name, chart] of Object.entries(charts)) chart.show(process.history.times, process.history[name], process.time);
}

async function poll() {
  clearTimeout(timer);
  try {
    const response = await fetch("/status.json", { signal: AbortSignal.timeout(REQUEST_SECONDS * 1000) });
    if (!response.ok) throw new Error(`status ${response.status}`);
    show(await response.json());
    lastAnswer = new Date();
    set("updated", `updated ${clock(lastAnswer)}`);
    element("offline").hidden = true;
  } catch (error) {
    showOffline(error);
  }
  document.documentElement.dataset.polled = String(Number(document.documentElement.dataset.polled ?? 0) + 1);
  if (!document.hidden) timer = setTimeout(poll, POLL_SECONDS * 1000);
}

function showOffline(error) {
  const since = lastAnswer === null ? "" : ` What you see is from ${clock(lastAnswer)}.`;
  set("offline", `The daemon does not answer (${error.message}).${since} The page tries again every ${POLL_SECONDS} seconds.`);
  element("offline").hidden = false;
  element("loading").hidden = true;
  document.title = "NO ANSWER · indexer";
}

async function lookUp(account) {
  element("account").value = account;
  const result = element("account-result");
  try {
    const response = await fetch(`/account.json?${new URLSearchParams({ account })}`, { signal: AbortSignal.timeout(REQUEST_SECONDS * 1000) });
    const answer = await response.json();
    result.replaceChildren(...(answer.error ? [paragraph(answer.error)] : accountNodes(answer)));
  } catch (error) {
    result.replaceChildren(paragraph(`The daemon does not answer (${error.message}).`));
  }
  element("lookup-title").scrollIntoView({ block: "nearest" });
}

function paragraph(value) {
  const node = document.createElement("p");
  node.textContent = value;
  return node;
}

const nextAttempt = (seconds) => (seconds === null ? text(null) : seconds === 0 ? "due now" : `in ${duration(seconds)}`);

function accountNodes(answer) {
  const nodes = answer.summary.map(paragraph);
  if (!answer.found) return nodes;
  const list = document.createElement("dl");
  list.className = "facts";
  const facts = {
    DID: answer.did,
    handle: text(answer.handle),
    PDS: text(answer.pds),
    "sync status": answer.sync_reason ? `${answer.sync_status} (${answer.sync_reason})` : answer.sync_status,
    "hosting status": `${answer.hosting_status}, ${answer.visible ? "visible" : "hidden"}`,
    records: `${whole(answer.records)}${answer.more_records ? " or more" : ""}`,
    rev: text(answer.rev),
    synchronized: ago(answer.synchronized_seconds_ago),
    "failed attempts": whole(answer.attempts),
    "next attempt": nextAttempt(answer.next_attempt_seconds),
    "last error": text(answer.last_error),
  };
  for (const [name, value] of Object.entries(facts)) {
    if (value === text(null)) continue;
    const term = document.createElement("dt"), detail = document.createElement("dd");
    term.textContent = name;
    detail.textContent = value;
    list.append(term, detail);
  }
  return [...nodes, list];
}

element("lookup").addEventListener("submit", (event) => {
  event.preventDefault();
  lookUp(element("account").value.trim());
});
document.addEventListener("visibilitychange", () => { if (!document.hidden) poll(); });
poll();
