// @ts-check
/* The browser's own database: conversations, and the runs of their answers. Nothing of it is sent
   anywhere. Where a browser keeps nothing (a private window), each call fails. */

let opening = null;

function database() {
  opening ??= new Promise((resolve, reject) => {
    const asked = indexedDB.open("outrider", 1);
    asked.onupgradeneeded = () => {
      for (const kind of ["conversations", "runs"]) asked.result.createObjectStore(kind, { keyPath: "id" });
    };
    asked.onsuccess = () => resolve(asked.result);
    asked.onerror = () => reject(asked.error);
  });
  return opening;
}

async function transact(kind, mode, work) {
  const known = (await database()).transaction(kind, mode);
  return new Promise((resolve, reject) => {
    const asked = work(known.objectStore(kind));
    known.oncomplete = () => resolve(asked.result);
    known.onabort = () => reject(known.error);
  });
}

export const all = (kind) => transact(kind, "readonly", (records) => records.getAll());
export const get = (kind, id) => transact(kind, "readonly", (records) => records.get(id));
export const put = (kind, record) => transact(kind, "readwrite", (records) => records.put(record));
export const remove = (kind, id) => transact(kind, "readwrite", (records) => records.delete(id));
