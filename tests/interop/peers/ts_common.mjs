// What both TypeScript peers need: the SDK, which is installed elsewhere, and the script.
import fs from "node:fs";
import path from "node:path";
import { createRequire } from "node:module";
import { fileURLToPath, pathToFileURL } from "node:url";

const here = path.dirname(fileURLToPath(import.meta.url));

export const SCRIPT = JSON.parse(fs.readFileSync(path.join(here, "script.json"), "utf8"));

/** The SDK's main module, as its package.json names it. */
export function loadSdk(folder) {
  const require = createRequire(path.join(folder, "package.json"));
  return import(pathToFileURL(require.resolve("@agentclientprotocol/sdk")).href);
}
