// A client on the official TypeScript SDK that knows nothing of journals, with an agent that has one.
//
// `node ts_sdk_durable.mjs SDK CWD AGENT [ARGUMENT ...]` starts the agent three times, and prints what each
// showed.
import { spawn } from "node:child_process";
import { once } from "node:events";
import process from "node:process";
import { Readable, Writable } from "node:stream";
import { loadSdk } from "./ts_common.mjs";

const [sdk, CWD, ...AGENT] = process.argv.slice(2);
const acp = await loadSdk(sdk);
const { agent: A, client: C } = acp.methods;
const asText = (text) => [{ type: "text", text }];

/** Start the agent, let it work, and tell what was shown. */
async function withAgent(work) {
  const child = spawn(AGENT[0], AGENT.slice(1), { stdio: ["pipe", "pipe", "inherit"] });
  const exit = once(child, "exit");
  const stream = acp.ndJsonStream(Writable.toWeb(child.stdin), Readable.toWeb(child.stdout));
  const shown = { updates: [] };
  const app = acp.client({ name: "stock" }).onNotification(C.session.update, ({ params }) => {
    shown.updates.push(params.update);
  });
  await app.connectWith(stream, async (agent) => {
    shown.hello = await agent.request(A.initialize, {
      protocolVersion: acp.PROTOCOL_VERSION,
      clientCapabilities: {},
    });
    shown.result = await work(agent);
    // A handler of notifications may end after the answer was handed over.
    await new Promise((resolve) => setTimeout(resolve, 50));
  });
  child.stdin.end();
  await exit;
  return shown;
}

let sessionId;
const setup = () => ({ sessionId, cwd: CWD, mcpServers: [] });
const prompt = (agent, text) => agent.request(A.session.prompt, { sessionId, prompt: asText(text) });

const runs = [
  async (agent) => {
    ({ sessionId } = await agent.request(A.session.new, { cwd: CWD, mcpServers: [] }));
    await prompt(agent, "one");
    await agent.request(A.session.setMode, { sessionId, modeId: "code" });
    return sessionId;
  },
  async (agent) => {
    const { sessions } = await agent.request(A.session.list, { cwd: CWD });
    const loaded = await agent.request(A.session.load, setup());
    await prompt(agent, "two");
    return { listed: sessions, loaded };
  },
  async (agent) => {
    const resumed = await agent.request(A.session.resume, setup());
    await prompt(agent, "three");
    return { resumed };
  },
];
const report = [];
for (const work of runs) report.push(await withAgent(work));
console.log(JSON.stringify(report));
