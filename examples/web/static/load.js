// Downloads files with progress. What fails is an Error whose message says which file, why, and what to do.

/// `names` to `{name: Uint8Array}`; `told(bytes, total)` as they come.
export async function download(names, told) {
  const got = Object.fromEntries(names.map((name) => [name, 0]));
  const sizes = { ...got };
  const sum = (by) => Object.values(by).reduce((a, b) => a + b, 0);
  const one = async (name) => {
    const why = (reason) => new Error(`${name} could not be downloaded: ${reason}. Check the connection, and try again.`);
    let response;
    try {
      response = await fetch(name);
    } catch (error) {
      throw why(error.message);
    }
    if (!response.ok) throw why(`the server answered ${response.status} ${response.statusText}`.trim());
    // Of a compressed answer the length is another.
    const plain = !response.headers.get("content-encoding");
    const length = plain ? Number(response.headers.get("content-length")) : 0;
    sizes[name] = length;
    const parts = [];
    try {
      const reader = response.body.getReader();
      for (let part; !(part = await reader.read()).done;) {
        parts.push(part.value);
        got[name] += part.value.length;
        told(sum(got), sum(sizes));
      }
    } catch (error) {
      throw why(error.message);
    }
    if (length && got[name] !== length) throw why(`it has ${got[name]} of ${length} bytes`);
    const bytes = new Uint8Array(got[name]);
    let at = 0;
    for (const part of parts) {
      bytes.set(part, at);
      at += part.length;
    }
    return [name, bytes];
  };
  return Object.fromEntries(await Promise.all(names.map(one)));
}

/// What is in a gzip file. A server may have unpacked it on the way.
export async function unpacked(name, bytes) {
  if (bytes[0] !== 0x1f || bytes[1] !== 0x8b) return bytes;
  try {
    const plain = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Uint8Array(await new Response(plain).arrayBuffer());
  } catch (error) {
    throw new Error(`${name} could not be unpacked: ${error.message}. Load the page again.`);
  }
}
