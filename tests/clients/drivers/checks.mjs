// Runs the checks of a driver and prints a line for each; where the server is.
import { spawnSync } from "node:child_process";
export { strictEqual as equal, ok } from "node:assert";

export const URL_ = process.env.SERVER_URL;
export const V1 = `${URL_}/v1`;
export const KEY = process.env.SERVER_KEY;
export const MODEL = process.env.SERVER_MODEL;
export const SUM = '[[call add {"a": 47, "b": 38}]] [[say It is 85.]]';
export const SCHEMA = {
  type: "object",
  properties: { a: { type: "integer" }, b: { type: "integer" } },
  required: ["a", "b"],
};

export async function run(...checks) {
  for (const check of checks) {
    try {
      await check();
      console.log(`\nok ${check.name}`);
    } catch (error) {
      console.error(error);
      const reason = `${error.name}: ${error.message}`.replace(/\s+/g, " ");
      console.log(`\nfailed ${check.name} ${reason.slice(0, 500)}`);
    }
  }
}

// Say why something could not be checked.
export function left(name, reason) {
  console.log(`\nleft ${name} ${reason}`);
}

// What a command prints; throws if it fails or takes too long.
export function outputOf(command, args, env = {}, input = "") {
  const options = { encoding: "utf8", timeout: 100_000, env: { ...process.env, ...env }, input };
  const done = spawnSync(command, args, options);
  console.log(done.stdout, done.stderr);
  if (done.status !== 0) {
    const end = `${done.stderr?.slice(-200)} ${done.stdout?.slice(-200)}`;
    throw new Error(`${command} ended with ${done.status ?? done.signal}: ${end}`);
  }
  return done.stdout;
}
