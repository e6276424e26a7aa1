// What Python does and JavaScript does not, for the translated planner. A dictionary is a Map, a list or a tuple an
// Array, a set a Set, None is null; a whole number beyond 2^53 is a BigInt.
const py = (() => {
  class UserError extends Error {}
  class ValueError extends Error {}
  class Counter extends Map {
    constructor(items = []) {
      super();
      for (const item of iterate(items)) this.set(item, (this.get(item) || 0) + 1);
    }
  }

  const iterate = (x) => (x instanceof Map ? x.keys() : x);
  const list = (x = []) => (Array.isArray(x) ? x : [...iterate(x)]);
  const kept = (x) => (x === undefined ? null : x);

  function truthy(x) {
    if (x === null || x === undefined || x === false || x === 0 || x === "") return false;
    if (Array.isArray(x)) return x.length > 0;
    return x instanceof Map || x instanceof Set ? x.size > 0 : true;
  }

  function compare(a, b) {
    if (!Array.isArray(a)) return a < b ? -1 : a > b ? 1 : 0;
    for (let i = 0; i < Math.min(a.length, b.length); i++) {
      const order = compare(a[i], b[i]);
      if (order) return order;
    }
    return a.length - b.length;
  }

  function extreme(sign, options, values) {
    const items = values.length === 1 ? list(values[0]) : values;
    if (!items.length) {
      if (options.default === undefined) throw new ValueError("no values");
      return options.default;
    }
    const key = options.key || ((x) => x);
    let best = items[0];
    let bestKey = key(best);
    for (let i = 1; i < items.length; i++) {
      const next = key(items[i]);
      if (sign * compare(next, bestKey) > 0) [best, bestKey] = [items[i], next];
    }
    return best;
  }

  function equal(a, b) {
    if (a === b) return true;
    if (a === null || b === null || typeof a !== "object" || typeof b !== "object") return false;
    if (Array.isArray(a) && Array.isArray(b)) return a.length === b.length && a.every((x, i) => equal(x, b[i]));
    if (a instanceof Map && b instanceof Map) return a.size === b.size && [...a].every(([k, v]) => equal(v, kept(b.get(k))));
    return false;
  }

  function at(x, index) {
    if (Array.isArray(x) || typeof x === "string") return x[index < 0 ? x.length + index : index];
    const found = x.get(index);
    if (found !== undefined) return found;
    if (x instanceof Counter) return 0;
    throw new ValueError(`no ${index}`);
  }

  function put(x, index, value) {
    if (x instanceof Map) x.set(index, value);
    else x[index < 0 ? x.length + index : index] = value;
  }

  function slice(x, start, stop, step) {
    const part = x.slice(start === null ? 0 : start, stop === null ? undefined : stop);
    if (step === null) return part;
    if (step !== -1 || start !== null || stop !== null) throw new ValueError("this step");
    return part.reverse();
  }

  function floorDivide(a, b) {
    return typeof a === "bigint" ? a / b : Math.floor(a / b);
  }

  function modulo(a, b) {
    const rest = a % b;
    return rest !== 0 && rest < 0 !== b < 0 ? rest + b : rest;
  }

  // Numerator and denominator of a number, exactly: floats are whole numbers times powers of two.
  function ratio(x) {
    let denominator = 1n;
    let numerator = x;
    for (; !Number.isInteger(numerator); numerator *= 2) denominator *= 2n;
    return [BigInt(numerator), denominator];
  }

  const KINDS = {
    bool: (x) => typeof x === "boolean",
    int: (x) => Number.isInteger(x) || typeof x === "bigint" || typeof x === "boolean",
    float: (x) => typeof x === "number" && !Number.isInteger(x),
    str: (x) => typeof x === "string",
    list: (x) => Array.isArray(x),
    Mapping: (x) => x instanceof Map,
  };

  function isinstance(x, kinds) {
    return kinds.some((kind) => {
      if (!KINDS[kind]) throw new ValueError(`isinstance of ${kind}`);
      return KINDS[kind](x);
    });
  }

  function str(x) {
    if (x === null) return "None";
    if (typeof x === "boolean") return x ? "True" : "False";
    return String(x);
  }

  function format(x, specification) {
    const [, sign, comma, places, kind] = /^(\+?)(,?)(?:\.(\d+)([f%]))?$/.exec(specification);
    let text = places === undefined ? str(x) : ((kind === "%" ? 100 : 1) * x).toFixed(Number(places));
    if (comma) text = text.replace(/^-?\d+/, (digits) => digits.replace(/\B(?=(\d{3})+$)/g, ","));
    return (sign && x >= 0 ? "+" : "") + text + (kind === "%" ? "%" : "");
  }

  // Keeps results by arguments: numbers and texts by value, objects by identity, which is at most slower.
  function cached(compute) {
    let results = new Map();
    let size = 0;
    return (...values) => {
      let level = results;
      for (const value of values) {
        if (!level.has(value)) level.set(value, new Map());
        level = level.get(value);
      }
      if (!level.has(cached)) {
        level.set(cached, compute(...values));
        if (++size > 65536) [results, size] = [new Map(), 0];
      }
      return level.get(cached);
    };
  }

  const on = {
    append: (x, value) => void x.push(value),
    as_integer_ratio: ratio,
    get: (x, key, otherwise = null) => (x.has(key) ? x.get(key) : otherwise),
    index: (x, value) => x.indexOf(value),
    items: (x) => [...x.entries()],
    join: (x, parts) => list(parts).join(x),
    lower: (x) => x.toLowerCase(),
    most_common: (x, count) => [...x.entries()].sort((a, b) => b[1] - a[1]).slice(0, count),
    partition: (x, mark) => (x.includes(mark) ? [x.slice(0, x.indexOf(mark)), mark, x.slice(x.indexOf(mark) + mark.length)] : [x, "", ""]),
    removeprefix: (x, start) => (x.startsWith(start) ? x.slice(start.length) : x),
    removesuffix: (x, end) => (end && x.endsWith(end) ? x.slice(0, -end.length) : x),
    replace: (x, old, now, count) => (count === 1 ? x.replace(old, () => now) : x.split(old).join(now)),
    sortWith: ({ key }, x) => {
      const keyed = x.map((item) => [key(item), item]).sort((a, b) => compare(a[0], b[0]));
      keyed.forEach(([, item], index) => (x[index] = item));
    },
    startswith: (x, start) => x.startsWith(start),
    values: (x) => [...x.values()],
  };

  return {
    on,
    Counter: (items) => new Counter(items),
    UserError: (message) => new UserError(message),
    ValueError: (message) => new ValueError(message),
    isUserError: (error) => error instanceof UserError,
    iterate, list, truthy, equal, at, put, slice, floorDivide, modulo, isinstance, str, format, cached,
    inf: Infinity, ceil: Math.ceil, log2: Math.log2, isqrt: (x) => Math.floor(Math.sqrt(x)), isfinite: Number.isFinite, ellipsis: Symbol("..."),
    all: (x) => list(x).every(truthy),
    any: (x) => list(x).some(truthy),
    bool: truthy,
    or: (first, ...others) => others.reduce((value, next) => (truthy(value) ? value : next()), first),
    and: (first, ...others) => others.reduce((value, next) => (truthy(value) ? next() : value), first),
    same: (a, b) => kept(a) === kept(b),
    contains: (container, x) => (Array.isArray(container) ? container.some((y) => equal(x, y)) : typeof container === "string" ? container.includes(x) : container.has(x)),
    unite: (a, b) => (a instanceof Map ? new Map([...a, ...b]) : new Set([...a, ...b])),
    repeat: (x, count) => Array.from({ length: x.length * count }, (_, i) => x[i % x.length]),
    require: (holds) => { if (!holds) throw new ValueError("an assertion fails"); },
    repr: (x) => (typeof x === "string" ? `'${x}'` : str(x)),
    len: (x) => (x instanceof Map || x instanceof Set ? x.size : x.length),
    max: (...values) => (values.length === 2 && typeof values[0] === "number" ? (values[1] > values[0] ? values[1] : values[0]) : extreme(1, {}, values)),
    min: (...values) => (values.length === 2 && typeof values[0] === "number" ? (values[1] < values[0] ? values[1] : values[0]) : extreme(-1, {}, values)),
    maxWith: (options, ...values) => extreme(1, options, values),
    minWith: (options, ...values) => extreme(-1, options, values),
    divmod: (a, b) => [floorDivide(a, b), modulo(a, b)],
    sum: (x) => list(x).reduce((a, b) => a + b, 0),
    int: (x) => (typeof x === "bigint" ? x : Math.trunc(Number(x))),
    float: (x) => (x === "inf" ? Infinity : Number(x)),
    tuple: (x) => list(x),
    set: (x = []) => new Set(iterate(x)),
    sorted: (x) => [...iterate(x)].sort(compare),
    reversed: (x) => [...list(x)].reverse(),
    enumerate: (x, start = 0) => list(x).map((item, index) => [index + start, item]),
    zipWith: (_, ...lists) => list(lists[0]).map((_, index) => lists.map((one) => list(one)[index])),
    next: (x, otherwise) => (list(x).length ? list(x)[0] : otherwise),
    getattr: (x, name) => x[name],
    range: (start, stop) => (stop === undefined ? Array.from({ length: Math.max(0, start) }, (_, i) => i) : Array.from({ length: Math.max(0, stop - start) }, (_, i) => start + i)),
    pairwise: (x) => list(x).slice(1).map((item, index) => [list(x)[index], item]),
    accumulate: (x) => list(x).reduce((ends, item) => [...ends, ends.length ? ends[ends.length - 1] + item : item], []),
    partial: (f, ...first) => (...rest) => f(...first, ...rest),
    dumps: (x) => JSON.stringify(plain(x)),
    asdict: (x) => new Map(Object.entries(x)),
    fields: (kind) => Object.keys(new kind({})).map((name) => ({ name })),
    replaceWith: (changes, x) => new x.constructor({ ...x, ...changes }),
    mapped, plain,
  };

  // Returns parsed JSON as the planner takes it, and back.
  function mapped(x) {
    if (Array.isArray(x)) return x.map(mapped);
    return x !== null && typeof x === "object" ? new Map(Object.entries(x).map(([key, value]) => [key, mapped(value)])) : x;
  }
  function plain(x) {
    if (Array.isArray(x)) return x.map(plain);
    return x instanceof Map ? Object.fromEntries([...x].map(([key, value]) => [key, plain(value)])) : x;
  }
})();
