// Orders to the run, in a dialog that asks for the run's token. The token stays in the dialog.

import { byId, make, setData, setHidden, setText } from "./dom.js";
import * as format from "./format.js";

const ENDED = ["finished", "failed"];

let state = null;

/** Why an order is impossible now; empty: it is possible. */
function objection(order) {
  const run = state.run;
  if (ENDED.includes(run.state)) return "The run has ended.";
  if (order === "pause" && run.state === "paused") return "The run is already paused.";
  if (order === "resume" && run.state !== "paused") return "The run is not paused.";
  if (order === "drain" && !drainable().length) return "No node is a member.";
  if (order === "rollback" && !state.checkpoints.length) return "There is no checkpoint to go back to.";
  return "";
}

const drainable = () => state.nodes.filter((node) => ["training", "late", "paused"].includes(node.state));

/** Use the run's newest state, even while an earlier one is shown. */
export function updateOrders(newest) {
  state = newest;
  setHidden(byId("open-orders"), state.run_id === null);
  if (byId("orders").open) draw();
}

function draw() {
  const { allowed, why } = state.orders;
  setHidden(byId("orders-why"), allowed);
  setText(byId("orders-why"), allowed ? "" : why || "This board takes no orders.");
  for (const input of byId("orders-list").querySelectorAll("input")) {
    const small = input.parentElement.querySelector("small");
    small.dataset.why ||= small.textContent;
    const objected = objection(input.value);
    input.disabled = !allowed || objected !== "";
    if (input.disabled) input.checked = false;
    setText(small, objected || small.dataset.why);
  }
  fill(byId("drain-node"), drainable().map((node) => [node.id, node.id]));
  fill(byId("rollback-step"), state.checkpoints.toReversed().map((one) => [
    String(one.step), `step ${format.whole(one.step)}, of ${format.clock(one.at_s)}`,
  ]));
  const order = wanted();
  setHidden(byId("drain-field"), order !== "drain");
  setHidden(byId("rollback-field"), order !== "rollback");
  byId("token").disabled = !allowed;
  byId("send-order").disabled = !allowed || !order;
}

const wanted = () => byId("orders-list").querySelector("input:checked")?.value ?? null;

function fill(select, choices) {
  if (JSON.stringify([...select.options].map((option) => [option.value, option.text])) === JSON.stringify(choices)) return;
  const before = select.value;
  select.replaceChildren(...choices.map(([value, text]) => {
    const option = make("option", "", text);
    option.value = value;
    return option;
  }));
  if (choices.some(([value]) => value === before)) select.value = before;
}

function tell(words, level) {
  setText(byId("orders-result"), words);
  setData(byId("orders-result"), "level", level);
}

async function send() {
  const order = wanted();
  const token = byId("token").value;
  if (!order) return;
  if (!token) {
    tell("An order needs the run's token.", "bad");
    byId("token").focus();
    return;
  }
  const body = { order };
  if (order === "drain") body.node = byId("drain-node").value;
  if (order === "rollback") body.step = Number(byId("rollback-step").value);
  byId("send-order").disabled = true;
  tell("Sending…", "unknown");
  try {
    const answer = await fetch("/api/orders", {
      method: "POST",
      headers: { "Content-Type": "application/json", Authorization: `Bearer ${token}` },
      body: JSON.stringify(body),
    });
    const said = await answer.json().catch(() => ({}));
    if (answer.ok) tell(`✓ Sent: ${order}. ${said.words ?? ""}`, "good");
    else tell(`✕ Refused: ${said.error ?? `answer ${answer.status}`}`, "bad");
  } catch (error) {
    const isToken = error instanceof TypeError && /[^\x20-\x7e]/.test(token);
    tell(isToken ? "✕ This token contains invalid characters." : "✕ The board does not answer; it is unknown whether the order was given.", "bad");
  }
  draw();
}

export function listenOrders() {
  const dialog = byId("orders");
  byId("open-orders").addEventListener("click", () => {
    tell("", "unknown");
    draw();
    dialog.showModal();
  });
  byId("close-orders").addEventListener("click", () => dialog.close());
  byId("orders-list").addEventListener("change", draw);
  byId("orders-form").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
}
