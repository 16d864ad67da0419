// @ts-check
import { needsKey, setKey } from "./api.js";
import { html, useRef } from "./html.js";

/** Asks for the key that the server wants; `used` is called when there is one. */
export function KeyForm({ used }) {
  const field = useRef(null);
  if (!needsKey.value) return null;
  const use = (event) => {
    event.preventDefault();
    setKey(field.current.value);
    used();
  };
  return html`
    <form class="card alert" onSubmit=${use} role="alert">
      <p>This server wants an API key. It is kept for this tab alone.</p>
      <label for="key">API key</label>
      <div class="row">
        <input id="key" type="password" autocomplete="off" ref=${field} />
        <button type="submit" class="strong">Use it</button>
      </div>
    </form>`;
}
