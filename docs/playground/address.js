// Text in an address: compressed, in letters that an address may have.

const through = (bytes, transform) => new Response(new Blob([bytes]).stream().pipeThrough(transform)).arrayBuffer();

export async function encoded(text) {
  const bytes = new Uint8Array(await through(text, new CompressionStream("deflate-raw")));
  const letters = btoa(Array.from(bytes, byte => String.fromCharCode(byte)).join(""));
  return letters.replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
}

// The text; null for an address that was cut short or changed.
export async function decoded(letters) {
  try {
    const packed = atob(letters.replaceAll("-", "+").replaceAll("_", "/"));
    const bytes = Uint8Array.from(packed, letter => letter.charCodeAt(0));
    return new TextDecoder().decode(await through(bytes, new DecompressionStream("deflate-raw")));
  } catch {
    return null;
  }
}
