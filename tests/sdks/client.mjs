// A client on the TypeScript SDK: makes the calls of a plan, and prints what came back.
//     node client.mjs SDK_FOLDER < plan.json
import { readFileSync } from "node:fs";

const sdk = process.argv[2];
const { Client } = await import(`${sdk}/dist/esm/client/index.js`);
const { StdioClientTransport } = await import(`${sdk}/dist/esm/client/stdio.js`);

const plan = JSON.parse(readFileSync(0, "utf8"));
const client = new Client({ name: "typescript", version: "1" });
await client.connect(
  new StdioClientTransport({ command: plan.command[0], args: plan.command.slice(1), env: plan.env }),
);
const { tools } = await client.listTools();
const results = [];
for (const { tool, arguments: given } of plan.calls) {
  const taken = Object.entries(given).map(([name, value]) =>
    value !== null && typeof value === "object" && "from" in value
      ? [name, results[value.from].structuredContent[value.field]]
      : [name, value],
  );
  results.push(await client.callTool({ name: tool, arguments: Object.fromEntries(taken) }));
}
await client.close();
console.log(JSON.stringify({ tools: tools.map((tool) => tool.name), results }));
