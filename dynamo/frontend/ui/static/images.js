// Images of the next question: chosen, pasted or dropped; and images as elements. They are drawn on a
// canvas, so that the page's policy need not allow images from data: URLs.

import { byId, counted, make } from "./dom.js";

const TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif"];
const MOST_BYTES = 8 << 20;
const HEIGHT = 96;

export function thumbnail({ name, url }) {
  const canvas = make("canvas", { class: "thumbnail", width: HEIGHT, height: HEIGHT, role: "img", "aria-label": name, title: name });
  draw(canvas, url).catch(() => canvas.replaceWith(make("span", { class: "dim" }, `${name} (not an image that this browser shows)`)));
  return canvas;
}

async function draw(canvas, url) {
  const [head, data] = url.split(",", 2);
  const bytes = Uint8Array.from(atob(data), (one) => one.charCodeAt(0));
  const type = /^data:([^;]*)/.exec(head)[1];
  const bitmap = await createImageBitmap(new Blob([bytes], { type }), { resizeHeight: HEIGHT });
  canvas.width = bitmap.width;
  canvas.getContext("2d").drawImage(bitmap, 0, 0);
  bitmap.close();
}

function read(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve({ name: file.name || "image", url: reader.result });
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

// `say` shows what is refused.
export class Attachments {
  constructor(say) {
    this.images = [];
    this.limit = 0;
    this.say = say;
    const input = byId("chat-files");
    byId("chat-attach").addEventListener("click", () => input.click());
    input.addEventListener("change", () => {
      this.add(input.files);
      input.value = "";
    });
    const form = byId("chat-form");
    form.addEventListener("paste", (event) => this.take(event, event.clipboardData));
    form.addEventListener("drop", (event) => this.take(event, event.dataTransfer));
    form.addEventListener("dragover", (event) => {
      if (this.limit) event.preventDefault();
    });
  }

  // How many the chosen models take.
  allow(limit) {
    this.limit = limit;
    byId("chat-attach").hidden = !limit;
  }

  set(images) {
    this.images = images;
    this.show();
  }

  take(event, data) {
    if (!data?.files.length) return;
    event.preventDefault();
    if (this.limit) this.add(data.files);
    else this.say("This model takes no images.");
  }

  async add(files) {
    for (const file of [...files]) { // a list that the input empties
      if (!TYPES.includes(file.type)) this.say(`${file.name}: not a PNG, JPEG, WebP or GIF image`);
      else if (file.size > MOST_BYTES) this.say(`${file.name}: larger than ${MOST_BYTES >> 20} MiB; send a smaller one`);
      else if (this.images.length >= this.limit) this.say(`This model takes at most ${counted(this.limit, "image")} in a request.`);
      else this.set([...this.images, await read(file)]);
    }
  }

  show() {
    byId("chat-attached").replaceChildren(...this.images.map((image) => {
      const remove = make("button", { type: "button", class: "quiet", "aria-label": `Remove ${image.name}` }, "×");
      remove.addEventListener("click", () => {
        this.set(this.images.filter((one) => one !== image));
        byId("chat-text").focus();
      });
      return make("span", { class: "attached" }, thumbnail(image), remove);
    }));
  }
}
