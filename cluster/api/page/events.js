"use strict";

// The events of a stream, as the standard of server-sent events reads them. Of their fields, only
// the data matter here.

// Cuts the text of a stream, which comes in parts, into the data of its events.
class EventCutter {
  constructor() {
    this.line = ""; // the beginning of a line
    this.data = []; // the lines of an event
    this.endsInReturn = false; // a line feed that follows belongs to the same end of line
  }

  // The data of the events that are complete with the next part of the text.
  push(text) {
    if (this.endsInReturn && text.startsWith("\n")) text = text.slice(1);
    else if (!text) return [];
    this.endsInReturn = text.endsWith("\r");
    const lines = (this.line + text).split(/\r\n|\n|\r/);
    this.line = lines.pop();
    return lines.flatMap((line) => this.takeLine(line));
  }

  // The data of the event that a line ends, if it does.
  takeLine(line) {
    if (line === "") {
      const lines = this.data;
      this.data = [];
      return lines.length ? [lines.join("\n")] : [];
    }
    const [, name, value] = /^([^:]*)(?:: ?)?([^]*)$/.exec(line);
    if (name === "data") this.data.push(value); // a comment has no name
    return [];
  }
}

// The events of an answer, as objects. Throws what the server says in place of an event, and for a
// stream without an end.
async function* events(response) {
  const decoder = new TextDecoder();
  const reader = response.body.getReader();
  const cutter = new EventCutter();
  try {
    while (true) {
      const { done, value } = await reader.read();
      if (done) throw new Error("the answer broke off");
      for (const data of cutter.push(decoder.decode(value, { stream: true }))) {
        if (data === "[DONE]") return;
        yield read(data);
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // frees the connection; fails if that has failed already
  }
}

function read(data) {
  let event;
  try {
    event = JSON.parse(data);
  } catch {
    throw new Error("the server sent an event that is not JSON");
  }
  if (event.error) throw new Error(event.error.message || "the server sent an error");
  return event;
}
