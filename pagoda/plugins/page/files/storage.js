// SPDX-License-Identifier: Apache-2.0
// Values that the browser keeps. If it refuses, the page keeps them until it is left.

export class Stored {
  // `area` is localStorage or sessionStorage, by name: to touch one may throw.
  constructor(area, name) {
    this.area = area;
    this.name = name;
    this.own = "";
  }

  get() {
    try {
      return window[this.area].getItem(this.name) ?? "";
    } catch {
      return this.own;
    }
  }

  // An empty text is forgotten.
  set(text) {
    this.own = text;
    try {
      if (text) window[this.area].setItem(this.name, text);
      else window[this.area].removeItem(this.name);
    } catch {
      // kept above
    }
  }
}
