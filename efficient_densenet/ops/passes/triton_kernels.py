"""The Triton kernels of a dense block. Imports Triton: nothing but :mod:`.launch` imports this, and only to launch.

Every matrix is rows of pixels by columns of channels, columns next to each other: a prefix or a slice of a wider one,
so its pitch (``ld…``) is an argument. What they have in common:

* Products and sums are accumulated in ``ACC`` (float32; float64 for proofs), operands rounded to the features' type as
  the plain path stores them. A sum over rows is written as one partial sum per program, ``(parts, …)``, and added up in
  a fixed order by a ``finish`` kernel: no atomics, the same bits in every run.
* ``V…`` is how many elements of a matrix are known to lie together at an aligned address, 16 bytes at best. A mask by
  the true number of channels would cost the vector loads; what is loaded is that number rounded up to ``V``, which the
  pitch covers, and the tail is replaced by zeros afterwards. :mod:`.launch` sees to both.
* The rectifier and its mask are ``x <= 0 ? 0 : …``, so that NaN passes as in torch.
* Programs are numbered along one axis (the others end at 65,535), those that share rows next to each other.
* Where two things do not depend on each other, one launch does both: the first programs one, the others the other.
"""

import inspect
import os

import triton
import triton.language as tl

# Triton 3.8's interpreter multiplies the bit patterns of bfloat16 operands, and cuts where it should round to bfloat16.
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


def kernel(function):
    """A kernel, compiled once for all sizes: of its numbers only a depth of 1 is worth a compilation of its own."""
    parameters = inspect.signature(function).parameters.values()
    names = [p.name for p in parameters if p.annotation is not tl.constexpr]
    sizes = [name for name in names if name.islower() or name in ("C", "N", "K", "H", "L", "O", "CW", "XC", "OH", "OL")]
    return triton.jit(function, do_not_specialize=sizes)


@triton.jit
def dot(a, b, acc, PREC: tl.constexpr):
    """``acc + a b``; interpreted, on exact copies of the operands in the accumulator's type."""
    if INTERPRETED:
        return tl.dot(a.to(acc.dtype), b.to(acc.dtype), acc, input_precision="ieee", out_dtype=acc.dtype)
    else:
        return tl.dot(a, b, acc, input_precision=PREC, out_dtype=acc.dtype)


@triton.jit
def rounded(x, to: tl.constexpr):
    """``x`` in type ``to``, the nearest value there."""
    if INTERPRETED:
        if (to == tl.bfloat16) & (x.dtype == tl.float32):
            bits = x.to(tl.int32, bitcast=True)
            even = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
            x = tl.where(x == x, even.to(tl.float32, bitcast=True), x)
        return x.to(to)
    else:
        return x.to(to)


@triton.jit
def up(n, V: tl.constexpr):
    """``n`` rounded up to a multiple of ``V``, in a form from which the compiler knows that it is one."""
    return (n + (V - 1)) // V * V


@triton.jit
def places(P, rows, ld, cols, V: tl.constexpr):
    """Pointers to a tile of a matrix; ``rows`` as 64-bit numbers, ``(BM,)``, ``cols`` next to each other."""
    return tl.multiple_of(P + rows[:, None] * ld + cols[None, :], (1, V * P.dtype.element_ty.primitive_bitwidth // 8))


@triton.jit
def places_across(P, rows, ld, cols, V: tl.constexpr):
    """The same, transposed."""
    return tl.multiple_of(P + rows[None, :] * ld + cols[:, None], (V * P.dtype.element_ty.primitive_bitwidth // 8, 1))


@triton.jit
def vector(P, cols, n, V: tl.constexpr):
    """Entries of a vector of ``n``, zero (or, before a multiple of ``V``, anything) behind its end."""
    at = tl.multiple_of(P + cols, (V * P.dtype.element_ty.primitive_bitwidth // 8,))
    return tl.load(at, mask=cols < up(n, V), other=0.0)


@triton.jit
def folded(x, s, t, ok):
    """``relu(s x + t)`` where ``ok``, else zero."""
    v = x * s[None, :] + t[None, :]
    return tl.where(ok & ~(v <= 0), v, 0.0)


@triton.jit
def store_sums(SUMS, part, first, second, cols, N):
    """``SUMS[part, 0..1, cols]``."""
    at = SUMS + part.to(tl.int64) * 2 * N + cols
    tl.store(at, first, mask=cols < N)
    tl.store(at + N, second, mask=cols < N)


@triton.jit
def store_statistics(PART, part, v, rmask, count, cols, N):
    """Mean and biased variance of a tile's columns."""
    v = tl.where(rmask[:, None], v, 0.0)
    mean = tl.sum(v, axis=0) / count
    d = tl.where(rmask[:, None], v - mean[None, :], 0.0)
    store_sums(PART, part, mean, tl.sum(d * d, axis=0) / count, cols, N)


@triton.jit
def window_rows(rows, D, H, L, PD: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr):
    """The row of the first pixel of a pooling window, of images (D, H, L)."""
    if PD * PH * PW == 1:
        return rows.to(tl.int64)
    else:
        w = rows % (L // PW)
        h = rows // (L // PW) % (H // PH)
        d = rows // (L // PW) // (H // PH) % (D // PD)
        n = rows // (L // PW) // (H // PH) // (D // PD)
        return ((n.to(tl.int64) * D + d * PD) * H + h * PH) * L + w * PW


@triton.jit
def tap_rows(rows, rmask, D, H, L, dd, dh, dw):
    """The row of the pixel at distance (dd, dh, dw), and whether it lies inside the image."""
    w = rows % L + dw
    h = rows // L % H + dh
    d = rows // L // H % D + dd
    inside = rmask & (w >= 0) & (w < L) & (h >= 0) & (h < H) & (d >= 0) & (d < D)
    return rows.to(tl.int64) + ((dd * H + dh) * L + dw), inside


@triton.jit
def _norm_relu_product(
    pid, X, ldx, SCALE, SHIFT, W, ldw, BIAS, OUT, ldo, PART, m, C, N, D, H, L,
    PD: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, BIASED: tl.constexpr, STATS: tl.constexpr,
    VX: tl.constexpr, VS: tl.constexpr, VW: tl.constexpr, VO: tl.constexpr,
    BM: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr, ACC: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    chunks = tl.cdiv(N, BC)
    pm = pid // chunks
    rows = pm * BM + tl.arange(0, BM)
    cols = pid % chunks * BC + tl.arange(0, BC)
    rmask = rows < m
    first = window_rows(rows, D, H, L, PD, PH, PW)
    acc = tl.zeros((BM, BC), dtype=ACC)
    for k in range(0, C, BK):
        ks = k + tl.arange(0, BK)
        s = vector(SCALE, ks, C, VS)
        t = vector(SHIFT, ks, C, VS)
        load = rmask[:, None] & (ks < up(C, VX))[None, :]
        z = folded(tl.load(places(X, first, ldx, ks, VX), mask=load, other=0.0).to(ACC), s, t, (ks < C)[None, :])
        for p in tl.static_range(1, PD * PH * PW):
            src = first + ((p // (PH * PW) * H + p // PW % PH) * L + p % PW)
            z += folded(tl.load(places(X, src, ldx, ks, VX), mask=load, other=0.0).to(ACC), s, t, (ks < C)[None, :])
        wmask = (ks < up(C, VW))[:, None] & (cols < N)[None, :]
        w = rounded(tl.load(places_across(W, cols, ldw, ks, VW), mask=wmask, other=0.0), X.dtype.element_ty)
        acc = dot(rounded(z, w.dtype), w, acc, PREC)
    if PD * PH * PW > 1:
        acc = acc / (PD * PH * PW)
    if BIASED:
        acc += vector(BIAS, cols, N, 1).to(ACC)[None, :]
    out = rounded(acc, OUT.dtype.element_ty)
    ok = rmask[:, None] & (cols < up(N, VO))[None, :]
    tl.store(places(OUT, rows.to(tl.int64), ldo, cols, VO), out, mask=ok)
    if STATS:  # of what was stored, rounded as stored
        store_statistics(PART, pm, out.to(ACC), rmask, tl.minimum(m - pm * BM, BM).to(ACC), cols, N)


@kernel
def norm_relu_product(
    X, ldx, SCALE, SHIFT, W, ldw, BIAS, OUT, ldo, PART, m, C, N, D, H, L,
    PD: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, BIASED: tl.constexpr, STATS: tl.constexpr,
    VX: tl.constexpr, VS: tl.constexpr, VW: tl.constexpr, VO: tl.constexpr,
    BM: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr, ACC: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """``out = mean_window relu(scale x + shift) Wᵀ + bias`` of m rows of ``out``, and its statistics.

    X: (rows, C); W: (N, C); OUT: (m, N); PART: (row blocks, 2, N). The window (PD, PH, PW) of images (D, H, L), without
    overlap, is a transition's pooling; (1, 1, 1) for a dense layer.
    """
    _norm_relu_product(
        tl.program_id(0), X, ldx, SCALE, SHIFT, W, ldw, BIAS, OUT, ldo, PART, m, C, N, D, H, L, PD, PH, PW, BIASED, STATS,
        VX, VS, VW, VO, BM, BC, BK, ACC, PREC,
    )  # fmt: skip


@kernel
def norm_relu_conv(
    X, ldx, SCALE, SHIFT, W, BIAS, FACTOR, image, fn, fp, fk, OUT, ldo, PART, m, C, K, D, H, L,
    TD: tl.constexpr, TH: tl.constexpr, TW: tl.constexpr,
    BIASED: tl.constexpr, DROPS: tl.constexpr, STATS: tl.constexpr,
    VX: tl.constexpr, VS: tl.constexpr, VW: tl.constexpr, VO: tl.constexpr,
    BM: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr, ACC: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """``out = factor (conv(relu(scale x + shift)) + bias)``, zero-padded, of taps (TD, TH, TW), and its statistics.

    X: (m, C); W: (K, taps, C), that is a channels-last kernel; OUT: (m, K); PART: (row blocks, 2, K).
    """
    chunks = tl.cdiv(K, BC)
    pm = tl.program_id(0) // chunks
    rows = pm * BM + tl.arange(0, BM)
    cols = tl.program_id(0) % chunks * BC + tl.arange(0, BC)
    rmask = rows < m
    acc = tl.zeros((BM, BC), dtype=ACC)
    steps = tl.cdiv(C, BK)
    for step in range(0, TD * TH * TW * steps):
        tap = step // steps
        cs = step % steps * BK + tl.arange(0, BK)
        src, inside = tap_rows(
            rows, rmask, D, H, L, tap // (TH * TW) - TD // 2, tap // TW % TH - TH // 2, tap % TW - TW // 2
        )
        load = inside[:, None] & (cs < up(C, VX))[None, :]
        x = tl.load(places(X, src, ldx, cs, VX), mask=load, other=0.0).to(ACC)
        ok = inside[:, None] & (cs < C)[None, :]
        a = folded(x, vector(SCALE, cs, C, VS), vector(SHIFT, cs, C, VS), ok)
        wmask = (cs < up(C, VW))[:, None] & (cols < K)[None, :]
        w = tl.load(places_across(W + tap * C, cols, TD * TH * TW * C, cs, VW), mask=wmask, other=0.0)
        acc = dot(rounded(a, X.dtype.element_ty), rounded(w, X.dtype.element_ty), acc, PREC)
    if BIASED:
        acc += vector(BIAS, cols, K, 1).to(ACC)[None, :]
    out = rounded(acc, OUT.dtype.element_ty)
    ok = rmask[:, None] & (cols < up(K, VO))[None, :]
    if DROPS:
        f = tl.load(factors(FACTOR, rows.to(tl.int64), cols, image, fn, fp, fk), mask=ok, other=0.0)
        out = rounded(out.to(ACC) * f.to(ACC), OUT.dtype.element_ty)
    tl.store(places(OUT, rows.to(tl.int64), ldo, cols, VO), out, mask=ok)
    if STATS:
        store_statistics(PART, pm, out.to(ACC), rmask, tl.minimum(m - pm * BM, BM).to(ACC), cols, K)


@triton.jit
def factors(FACTOR, rows, cols, image, fn, fp, fk):
    """Pointers to dropout's factors, (n, image, K) with strides fn, fp, fk."""
    return FACTOR + (rows // image * fn + rows % image * fp)[:, None] + (cols * fk)[None, :]


@triton.jit
def own_level(SLOPE, LEVEL, MEAN, cols, n):
    """``slope, level`` of ``g + slope y + level``, the deferred correction."""
    slope = vector(SLOPE, cols, n, 1)
    return slope, vector(LEVEL, cols, n, 1) - slope * vector(MEAN, cols, n, 1)


@triton.jit
def own_gradient(
    G, ldg, Y, ldy, FACTOR, image, fn, fp, fk, rows, rmask, cols, n, slope, level,
    CORRECT: tl.constexpr, DROPS: tl.constexpr, V: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """The complete gradient of some features: what their readers added up, and the deferred correction."""
    load = rmask[:, None] & (cols < up(n, V))[None, :]
    ok = rmask[:, None] & (cols < n)[None, :]
    g = tl.load(places(G, rows, ldg, cols, V), mask=load, other=0.0)
    if CORRECT:
        y = tl.load(places(Y, rows, ldy, cols, V), mask=load, other=0.0).to(ACC)
        g = rounded(g.to(ACC) + (y * slope[None, :] + level[None, :]), g.dtype)
    if DROPS:
        f = tl.load(factors(FACTOR, rows, cols, image, fn, fp, fk), mask=ok, other=0.0)
        g = rounded(g.to(ACC) * f.to(ACC), g.dtype)
    return tl.where(ok, g, 0.0)


@triton.jit
def _conv_input_gradient(
    pid, G, ldg, Y, ldy, SLOPE, LEVEL, YMEAN, FACTOR, image, fn, fp, fk, W, X, ldx, SCALE, SHIFT, MEAN, OUT, ldo,
    SUMS, m, C, K, D, H, L, first,
    TD: tl.constexpr, TH: tl.constexpr, TW: tl.constexpr,
    CORRECT: tl.constexpr, DROPS: tl.constexpr, ADD: tl.constexpr, WRITE: tl.constexpr,
    VG: tl.constexpr, VW: tl.constexpr, VX: tl.constexpr, VO: tl.constexpr,
    BM: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr, ACC: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """The gradient at the norm's output, ``dz = dy ⋆ flipped W, where relu(scale x + shift) > 0``, and its sums.

    SUMS: (row blocks, 2, C), ``Σ dz`` and ``Σ dz (x - mean)``. OUT: ``dz``, (m, C) (WRITE), or the columns from ``first``
    (counted in ``VO``) on of the gradient of x, to which ``scale dz`` is added (ADD).
    """
    chunks = tl.cdiv(C, BC)
    pm = pid // chunks
    rows = pm * BM + tl.arange(0, BM)
    cs = pid % chunks * BC + tl.arange(0, BC)
    rmask = rows < m
    acc = tl.zeros((BM, BC), dtype=ACC)
    steps = tl.cdiv(K, BK)
    for step in range(0, TD * TH * TW * steps):
        tap = step // steps
        ko = step % steps * BK + tl.arange(0, BK)
        src, inside = tap_rows(
            rows, rmask, D, H, L, TD // 2 - tap // (TH * TW), TH // 2 - tap // TW % TH, TW // 2 - tap % TW
        )
        slope = tl.zeros((BK,), dtype=ACC)
        level = slope
        if CORRECT:
            slope, level = own_level(SLOPE, LEVEL, YMEAN, ko, K)
        dy = own_gradient(
            G, ldg, Y, ldy, FACTOR, image, fn, fp, fk, src, inside, ko, K, slope, level, CORRECT, DROPS, VG, ACC
        )
        wmask = (ko < K)[:, None] & (cs < up(C, VW))[None, :]
        w = tl.load(places(W + tap * C, ko, TD * TH * TW * C, cs, VW), mask=wmask, other=0.0)
        acc = dot(dy, rounded(w, dy.dtype), acc, PREC)
    at = rows.to(tl.int64)
    load = rmask[:, None] & (cs < up(C, VX))[None, :]
    x = tl.load(places(X, at, ldx, cs, VX), mask=load, other=0.0).to(ACC)
    s = vector(SCALE, cs, C, 1)
    ok = rmask[:, None] & (cs < C)[None, :]
    dz = tl.where(ok & ~(x * s[None, :] + vector(SHIFT, cs, C, 1)[None, :] <= 0), acc, 0.0)
    if WRITE:
        dz = rounded(dz, OUT.dtype.element_ty).to(ACC)  # the sums are those of what is stored
        into = rmask[:, None] & (cs < up(C, VO))[None, :]
        tl.store(places(OUT, at, ldo, cs, VO), rounded(dz, OUT.dtype.element_ty), mask=into)
    if ADD:
        op = places(OUT, at, ldo, cs - first * VO, VO)
        into = rmask[:, None] & ((cs >= first * VO) & (cs < up(C, VO)))[None, :]
        g = tl.load(op, mask=into, other=0.0).to(ACC)
        tl.store(op, rounded(g + s[None, :] * dz, OUT.dtype.element_ty), mask=into)
    dzx = tl.where(ok, dz * (x - vector(MEAN, cs, C, 1)[None, :]), 0.0)
    store_sums(SUMS, pm, tl.sum(dz, axis=0), tl.sum(dzx, axis=0), cs, C)


@triton.jit
def _conv_weight_gradient(
    pid, G, ldg, Y, ldy, SLOPE, LEVEL, YMEAN, FACTOR, image, fn, fp, fk, X, ldx, SCALE, SHIFT, DW,
    m, C, K, D, H, L, split_rows,
    TD: tl.constexpr, TH: tl.constexpr, TW: tl.constexpr,
    CORRECT: tl.constexpr, DROPS: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
    VG: tl.constexpr, VX: tl.constexpr,
    BM: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr, ACC: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """``dW[k, tap, c] = Σ_q relu(scale x + shift)[q + tap, c] dy[q, k]``.

    A program sums over ``split_rows`` rows for one tap, BK output and BC input channels. DW: (splits, K taps C [+ K]),
    the last K with BIAS: ``Σ dy``.
    """
    taps: tl.constexpr = TD * TH * TW
    cchunks = tl.cdiv(C, BC)
    kchunks = tl.cdiv(K, BK)
    tap = pid % taps
    cs = pid // taps % cchunks * BC + tl.arange(0, BC)
    ko = pid // taps // cchunks % kchunks * BK + tl.arange(0, BK)
    split = pid // taps // cchunks // kchunks
    s = vector(SCALE, cs, C, 1)
    t = vector(SHIFT, cs, C, 1)
    slope = tl.zeros((BK,), dtype=ACC)
    level = slope
    if CORRECT:
        slope, level = own_level(SLOPE, LEVEL, YMEAN, ko, K)
    acc = tl.zeros((BK, BC), dtype=ACC)
    total = tl.zeros((BK,), dtype=ACC)
    start = split * split_rows
    stop = tl.minimum(start + split_rows, m)
    for r in range(start, stop, BM):
        rows = r + tl.arange(0, BM)
        rmask = rows < stop
        dy = own_gradient(
            G, ldg, Y, ldy, FACTOR, image, fn, fp, fk, rows.to(tl.int64), rmask, ko, K, slope, level,
            CORRECT, DROPS, VG, ACC,
        )  # fmt: skip
        if BIAS:
            total += tl.sum(dy.to(ACC), axis=0)
        if WEIGHT:
            src, inside = tap_rows(
                rows, rmask, D, H, L, tap // (TH * TW) - TD // 2, tap // TW % TH - TH // 2, tap % TW - TW // 2
            )
            load = inside[:, None] & (cs < up(C, VX))[None, :]
            x = tl.load(places(X, src, ldx, cs, VX), mask=load, other=0.0).to(ACC)
            a = folded(x, s, t, inside[:, None] & (cs < C)[None, :])
            acc = dot(tl.trans(dy), rounded(a, dy.dtype), acc, PREC)
    to = DW + split.to(tl.int64) * (K * taps * C * WEIGHT + K * BIAS)
    if WEIGHT:
        at = to + (ko * taps + tap)[:, None] * C + cs[None, :]
        tl.store(at, acc, mask=(ko < K)[:, None] & (cs < C)[None, :])
    if BIAS:
        alone = (tap == 0) & (pid // taps % cchunks == 0)
        tl.store(to + K * taps * C * WEIGHT + ko, total, mask=(ko < K) & alone)


@kernel
def conv_gradient(
    G, ldg, Y, ldy, SLOPE, LEVEL, YMEAN, FACTOR, image, fn, fp, fk, W, X, ldx, SCALE, SHIFT, MEAN, OUT, ldo, SUMS, DW,
    m, C, K, D, H, L, split_rows, first,
    TD: tl.constexpr, TH: tl.constexpr, TW: tl.constexpr, CORRECT: tl.constexpr, DROPS: tl.constexpr,
    INPUT: tl.constexpr, ADD: tl.constexpr, WRITE: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
    VG: tl.constexpr, VW: tl.constexpr, VX: tl.constexpr, VO: tl.constexpr,
    BM: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr, WM: tl.constexpr, WC: tl.constexpr, WK: tl.constexpr,
    ACC: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """The convolution backwards, from ``dy = factor (g + slope y + level - slope ymean)``.

    That is the complete gradient of the layer's own K channels, whose columns G and Y are; X: (m, C), what was read;
    W: (K, taps, C). The first programs, the longer ones, find the weight's gradient (WEIGHT or BIAS) in tiles of WM
    rows, WC and WK channels, the others the input's (INPUT) in tiles of BM, BC and BK.
    """
    pid = tl.program_id(0)
    weights = 0
    if WEIGHT or BIAS:
        weights = tl.cdiv(m, split_rows) * (TD * TH * TW) * tl.cdiv(C, WC) * tl.cdiv(K, WK)
        if pid < weights:
            _conv_weight_gradient(
                pid, G, ldg, Y, ldy, SLOPE, LEVEL, YMEAN, FACTOR, image, fn, fp, fk, X, ldx, SCALE, SHIFT, DW,
                m, C, K, D, H, L, split_rows, TD, TH, TW, CORRECT, DROPS, WEIGHT, BIAS, VG, VX, WM, WC, WK, ACC, PREC,
            )  # fmt: skip
    if INPUT:
        if pid >= weights:
            _conv_input_gradient(
                pid - weights, G, ldg, Y, ldy, SLOPE, LEVEL, YMEAN, FACTOR, image, fn, fp, fk, W, X, ldx, SCALE, SHIFT,
                MEAN, OUT, ldo, SUMS, m, C, K, D, H, L, first, TD, TH, TW, CORRECT, DROPS, ADD, WRITE, VG, VW, VX, VO,
                BM, BC, BK, ACC, PREC,
            )  # fmt: skip


@kernel
def product_gradient(
    X, ldx, G, ldg, B, ldb, DZ2, ldd, W, ldw, SCALE, SHIFT, MEAN, SCALE2, SLOPE2, LEVEL2, MEAN2, DW, SUMS,
    m, C, N, split_rows, first,
    CORRECT: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, INPUT: tl.constexpr, ADD: tl.constexpr,
    VX: tl.constexpr, VG: tl.constexpr, VB: tl.constexpr, VW: tl.constexpr,
    BM: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr, ACC: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """The 1x1 convolution backwards in one pass over the rows.

        db = scale2 dz2 + slope2 b + level2 - slope2 mean2,     dW = dbᵀ z (WEIGHT),     z = relu(scale x + shift)
        dz = db W where z > 0,     Σ dz,     Σ dz (x - mean) (INPUT),     G += scale dz (ADD)

    A program has BC of the C channels, all of the N <= BK, and ``split_rows`` rows. X: (rows, C); G: its columns from
    ``first`` (counted in ``VG``) on; B, DZ2: (m, N); W: (N, C). DW: (splits, N C [+ N]), the last N with
    BIAS: ``Σ db``; SUMS: (splits, 2, C).
    """
    chunks = tl.cdiv(C, BC)
    split = tl.program_id(0) // chunks
    cs = tl.program_id(0) % chunks * BC + tl.arange(0, BC)
    ns = tl.arange(0, BK)
    s = vector(SCALE, cs, C, 1)
    t = vector(SHIFT, cs, C, 1)
    mu = vector(MEAN, cs, C, 1)
    s2 = vector(SCALE2, ns, N, 1)
    slope = tl.zeros((BK,), dtype=ACC)
    level = slope
    if CORRECT:
        slope, level = own_level(SLOPE2, LEVEL2, MEAN2, ns, N)
    wmask = (ns < N)[:, None] & (cs < up(C, VW))[None, :]
    w = rounded(tl.load(places(W, ns.to(tl.int64), ldw, cs, VW), mask=wmask, other=0.0), X.dtype.element_ty)
    dw = tl.zeros((BK, BC), dtype=ACC)
    total = tl.zeros((BK,), dtype=ACC)
    sum0 = tl.zeros((BC,), dtype=ACC)
    sum1 = tl.zeros((BC,), dtype=ACC)
    start = split * split_rows
    stop = tl.minimum(start + split_rows, m)
    for r in range(start, stop, BM):
        rows = r + tl.arange(0, BM)
        rmask = rows < stop
        at = rows.to(tl.int64)
        load = rmask[:, None] & (ns < up(N, VB))[None, :]
        db = tl.load(places(DZ2, at, ldd, ns, VB), mask=load, other=0.0).to(ACC) * s2[None, :]
        if CORRECT:
            b = tl.load(places(B, at, ldb, ns, VB), mask=load, other=0.0).to(ACC)
            db = tl.where(load, db + (b * slope[None, :] + level[None, :]), 0.0)
        if BIAS:
            total += tl.sum(db, axis=0)
        db = rounded(db, X.dtype.element_ty)
        load = rmask[:, None] & (cs < up(C, VX))[None, :]
        ok = rmask[:, None] & (cs < C)[None, :]
        x = tl.load(places(X, at, ldx, cs, VX), mask=load, other=0.0).to(ACC)
        z = folded(x, s, t, ok)
        if WEIGHT:
            dw = dot(tl.trans(db), rounded(z, db.dtype), dw, PREC)
        if INPUT:
            dz = dot(db, w, tl.zeros((BM, BC), dtype=ACC), PREC)
            dz = tl.where(ok & ~(z <= 0), dz, 0.0)
            sum0 += tl.sum(dz, axis=0)
            sum1 += tl.sum(tl.where(ok, dz * (x - mu[None, :]), 0.0), axis=0)
            if ADD:
                # To the columns from C to its multiple of VX zero is added: a mask by C would cost the vector stores.
                # They lie in this program's chunk, and whoever they belong to runs before or after.
                gp = places(G, at, ldg, cs - first * VG, VG)
                into = load & (cs >= first * VG)[None, :]
                g = tl.load(gp, mask=into, other=0.0)
                tl.store(gp, rounded(g.to(ACC) + s[None, :] * dz, g.dtype), mask=into)
    to = DW + split.to(tl.int64) * (N * C * WEIGHT + N * BIAS)
    if WEIGHT:
        tl.store(to + ns[:, None] * C + cs[None, :], dw, mask=(ns < N)[:, None] & (cs < C)[None, :])
    if BIAS:
        tl.store(to + N * C * WEIGHT + ns, total, mask=(ns < N) & (tl.program_id(0) % chunks == 0))
    if INPUT:
        store_sums(SUMS, split, sum0, sum1, cs, C)


@kernel
def norm_relu(
    X, ldx, SCALE, SHIFT, OUT, ldo, m, C, VX: tl.constexpr, VO: tl.constexpr,
    BM: tl.constexpr, BC: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """``out = relu(scale x + shift)``."""
    chunks = tl.cdiv(C, BC)
    rows = tl.program_id(0) // chunks * BM + tl.arange(0, BM)
    cs = tl.program_id(0) % chunks * BC + tl.arange(0, BC)
    at = rows.to(tl.int64)
    rmask = (rows < m)[:, None]
    x = tl.load(places(X, at, ldx, cs, VX), mask=rmask & (cs < up(C, VX))[None, :], other=0.0).to(ACC)
    z = folded(x, vector(SCALE, cs, C, 1), vector(SHIFT, cs, C, 1), rmask & (cs < C)[None, :])
    tl.store(places(OUT, at, ldo, cs, VO), rounded(z, OUT.dtype.element_ty), mask=rmask & (cs < up(C, VO))[None, :])


@kernel
def norm_relu_gradient(
    X, ldx, SCALE, SHIFT, MEAN, DP, image, pn, pp, pc, G, ldg, SUMS,
    m, C, D, H, L, split_rows, first,
    PD: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    WRITE: tl.constexpr, SCALED: tl.constexpr, POOLED: tl.constexpr,
    VX: tl.constexpr, VP: tl.constexpr, VG: tl.constexpr,
    BM: tl.constexpr, BC: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """What closes a block, backwards: ``dz = dp / window`` where ``z = relu(scale x + shift)`` is positive.

        Σ dz,     Σ dz (x - mean),     G = dz (WRITE) or scale dz (SCALED)

    DP: (n, image, C) of the m windows, with strides pn, pp, pc, or rows of pitch pp where VP is not 0; with POOLED, the
    mean of the window's z takes its place. X: (rows, C); G: its columns from ``first`` (counted in ``VG``) on;
    SUMS: (splits, 2, C).
    """
    chunks = tl.cdiv(C, BC)
    split = tl.program_id(0) // chunks
    cs = tl.program_id(0) % chunks * BC + tl.arange(0, BC)
    s = vector(SCALE, cs, C, 1)
    t = vector(SHIFT, cs, C, 1)
    mu = vector(MEAN, cs, C, 1)
    sum0 = tl.zeros((BC,), dtype=ACC)
    sum1 = tl.zeros((BC,), dtype=ACC)
    start = split * split_rows
    stop = tl.minimum(start + split_rows, m)
    for r in range(start, stop, BM):
        rows = r + tl.arange(0, BM)
        rmask = (rows < stop)[:, None]
        ok = rmask & (cs < C)[None, :]
        wide = rows.to(tl.int64)
        if VP == 0:
            dpp = DP + (wide // image * pn + wide % image * pp)[:, None] + (cs * pc)[None, :]
        else:
            dpp = places(DP, wide, pp, cs, VP)
        exact = ok if VP == 0 else rmask & (cs < up(C, VP))[None, :]
        dp = tl.load(dpp, mask=exact, other=0.0).to(ACC) / (PD * PH * PW)
        at = window_rows(rows, D, H, L, PD, PH, PW)
        pooled = tl.zeros((BM, BC), dtype=ACC)
        for p in tl.static_range(0, PD * PH * PW):
            src = at + ((p // (PH * PW) * H + p // PW % PH) * L + p % PW)
            x = tl.load(places(X, src, ldx, cs, VX), mask=rmask & (cs < up(C, VX))[None, :], other=0.0).to(ACC)
            z = folded(x, s, t, ok)
            dz = tl.where(ok & ~(z <= 0), dp, 0.0)
            if POOLED:
                pooled += z
            sum0 += tl.sum(dz, axis=0)
            sum1 += tl.sum(tl.where(ok, dz * (x - mu[None, :]), 0.0), axis=0)
            if WRITE:
                into = rmask & ((cs >= first * VG) & (cs < up(C, VG)))[None, :]
                gp = places(G, src, ldg, cs - first * VG, VG)
                g = s[None, :] * dz if SCALED else dz
                tl.store(gp, rounded(g, G.dtype.element_ty), mask=into)
        if POOLED:
            tl.store(dpp, rounded(pooled / (PD * PH * PW), DP.dtype.element_ty), mask=exact)
    store_sums(SUMS, split, sum0, sum1, cs, C)


@triton.jit
def pooled_tap(
    X, ldx, s, t, n, d, h, w, tap, rmask, cs, C, D, H, L,
    KH: tl.constexpr, KW: tl.constexpr, DD: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr,
    VX: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """``relu(scale x + shift)`` as stored at one tap of windows that start at (d, h, w), and whether it is inside."""
    d += tap // (KH * KW) * DD
    h += tap // KW % KH * DH
    w += tap % KW * DW
    inside = rmask & (d >= 0) & (d < D) & (h >= 0) & (h < H) & (w >= 0) & (w < L)
    at = ((n.to(tl.int64) * D + d) * H + h) * L + w
    x = tl.load(places(X, at, ldx, cs, VX), mask=inside[:, None] & (cs < up(C, VX))[None, :], other=0.0).to(ACC)
    z = folded(x, s, t, inside[:, None] & (cs < C)[None, :])
    return rounded(z, X.dtype.element_ty).to(ACC), inside[:, None]


@kernel
def norm_relu_max_pool(
    X, ldx, SCALE, SHIFT, OUT, ldo, m, C, D, H, L, OD, OH, OL,
    KD: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, SD: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
    PD: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, DD: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr,
    VX: tl.constexpr, VO: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """``out = max_window relu(scale x + shift)`` of m windows: (OD, OH, OL) of them in an image (D, H, L).

    Windows have KD KH KW taps DD, DH, DW apart, start SD, SH, SW apart, and the first one PD, PH, PW before the image.
    """
    chunks = tl.cdiv(C, BC)
    rows = tl.program_id(0) // chunks * BM + tl.arange(0, BM)
    cs = tl.program_id(0) % chunks * BC + tl.arange(0, BC)
    rmask = rows < m
    s = vector(SCALE, cs, C, 1)
    t = vector(SHIFT, cs, C, 1)
    n = rows // OL // OH // OD
    d = rows // OL // OH % OD * SD - PD
    h = rows // OL % OH * SH - PH
    w = rows % OL * SW - PW
    best = tl.full((BM, BC), float("-inf"), dtype=ACC)
    for tap in tl.static_range(0, KD * KH * KW):
        z, inside = pooled_tap(X, ldx, s, t, n, d, h, w, tap, rmask, cs, C, D, H, L, KH, KW, DD, DH, DW, VX, ACC)
        best = tl.where(inside & ((z > best) | (z != z)), z, best)
    into = rmask[:, None] & (cs < up(C, VO))[None, :]
    tl.store(places(OUT, rows.to(tl.int64), ldo, cs, VO), rounded(best, OUT.dtype.element_ty), mask=into)


@kernel
def norm_relu_max_pool_gradient(
    X, ldx, SCALE, SHIFT, MEAN, DP, ldp, DZ, ldz, SUMS, m, C, D, H, L, OD, OH, OL, split_rows,
    KD: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, SD: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
    PD: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, DD: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr,
    VX: tl.constexpr, VP: tl.constexpr, VO: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """The same backwards, for m pixels: a window's gradient goes to its first largest z, or its last NaN, as in torch.

    DP: (windows, C); DZ: (m, C), zero where z is; SUMS: (splits, 2, C), ``Σ dz`` and ``Σ dz (x - mean)``. Nothing is
    scattered: a pixel asks each window that may reach it, and the window's largest is found again.
    """
    chunks = tl.cdiv(C, BC)
    split = tl.program_id(0) // chunks
    cs = tl.program_id(0) % chunks * BC + tl.arange(0, BC)
    s = vector(SCALE, cs, C, 1)
    t = vector(SHIFT, cs, C, 1)
    mu = vector(MEAN, cs, C, 1)
    sum0 = tl.zeros((BC,), dtype=ACC)
    sum1 = tl.zeros((BC,), dtype=ACC)
    start = split * split_rows
    stop = tl.minimum(start + split_rows, m)
    ND: tl.constexpr = ((KD - 1) * DD + SD) // SD  # windows that may reach a pixel
    NH: tl.constexpr = ((KH - 1) * DH + SH) // SH
    NW: tl.constexpr = ((KW - 1) * DW + SW) // SW
    for r in range(start, stop, BM):
        rows = r + tl.arange(0, BM)
        rmask = rows < stop
        at = rows.to(tl.int64)
        n = rows // L // H // D
        dz = tl.zeros((BM, BC), dtype=ACC)
        for window in range(0, ND * NH * NW):
            od = (rows // L // H % D + PD) // SD - window // (NH * NW)
            oh = (rows // L % H + PH) // SH - window // NW % NH
            ow = (rows % L + PW) // SW - window % NW
            td = rows // L // H % D + PD - od * SD
            th = rows // L % H + PH - oh * SH
            tw = rows % L + PW - ow * SW
            reached = rmask & (od >= 0) & (od < OD) & (oh >= 0) & (oh < OH) & (ow >= 0) & (ow < OL)
            reached = reached & (td % DD == 0) & (th % DH == 0) & (tw % DW == 0)
            reached = reached & (td < KD * DD) & (th < KH * DH) & (tw < KW * DW)
            own = (td // DD * KH + th // DH) * KW + tw // DW
            best = tl.full((BM, BC), float("-inf"), dtype=ACC)
            which = tl.full((BM, BC), -1, dtype=tl.int32)
            for tap in range(0, KD * KH * KW):
                z, inside = pooled_tap(
                    X, ldx, s, t, n, od * SD - PD, oh * SH - PH, ow * SW - PW, tap, reached, cs, C, D, H, L,
                    KH, KW, DD, DH, DW, VX, ACC,
                )  # fmt: skip
                better = inside & ((z > best) | (z != z))
                best = tl.where(better, z, best)
                which = tl.where(better, tap, which)
            wrow = ((n.to(tl.int64) * OD + od) * OH + oh) * OL + ow
            load = reached[:, None] & (cs < up(C, VP))[None, :]
            dp = tl.load(places(DP, wrow, ldp, cs, VP), mask=load, other=0.0).to(ACC)
            dz += tl.where(reached[:, None] & (which == own[:, None]), dp, 0.0)
        ok = rmask[:, None] & (cs < C)[None, :]
        x = tl.load(places(X, at, ldx, cs, VX), mask=rmask[:, None] & (cs < up(C, VX))[None, :], other=0.0).to(ACC)
        dz = tl.where(ok & ~(folded(x, s, t, ok) <= 0), dz, 0.0)
        dz = rounded(dz, DZ.dtype.element_ty)
        tl.store(places(DZ, at, ldz, cs, VO), dz, mask=rmask[:, None] & (cs < up(C, VO))[None, :])
        dz = dz.to(ACC)
        sum0 += tl.sum(dz, axis=0)
        sum1 += tl.sum(tl.where(ok, dz * (x - mu[None, :]), 0.0), axis=0)
    store_sums(SUMS, split, sum0, sum1, cs, C)


@kernel
def correct(
    X, ldx, G, ldg, SCALE, SLOPE, LEVEL, MEAN, OUT, ldo, m, C, SCALED: tl.constexpr, CORRECT: tl.constexpr,
    VX: tl.constexpr, VG: tl.constexpr, VO: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """``out = scale g + slope (x - mean) + level``."""
    chunks = tl.cdiv(C, BC)
    rows = tl.program_id(0) // chunks * BM + tl.arange(0, BM)
    cs = tl.program_id(0) % chunks * BC + tl.arange(0, BC)
    at = rows.to(tl.int64)
    rmask = (rows < m)[:, None]
    g = tl.load(places(G, at, ldg, cs, VG), mask=rmask & (cs < up(C, VG))[None, :], other=0.0).to(ACC)
    if SCALED:
        g = g * vector(SCALE, cs, C, 1)[None, :]
    if CORRECT:
        slope, level = own_level(SLOPE, LEVEL, MEAN, cs, C)
        x = tl.load(places(X, at, ldx, cs, VX), mask=rmask & (cs < up(C, VX))[None, :], other=0.0).to(ACC)
        g += x * slope[None, :] + level[None, :]
    tl.store(places(OUT, at, ldo, cs, VO), rounded(g, OUT.dtype.element_ty), mask=rmask & (cs < up(C, VO))[None, :])


@kernel
def statistics(
    X, ldx, PART, m, C, VX: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr, ACC: tl.constexpr
):  # fmt: skip
    """Mean and biased variance of the columns of X, (m, C), of every BM rows: PART, (row blocks, 2, C)."""
    chunks = tl.cdiv(C, BC)
    pm = tl.program_id(0) // chunks
    rows = pm * BM + tl.arange(0, BM)
    cs = tl.program_id(0) % chunks * BC + tl.arange(0, BC)
    load = (rows < m)[:, None] & (cs < up(C, VX))[None, :]
    x = tl.load(places(X, rows.to(tl.int64), ldx, cs, VX), mask=load, other=0.0).to(ACC)
    store_statistics(PART, pm, x, rows < m, tl.minimum(m - pm * BM, BM).to(ACC), cs, C)


@kernel
def fold(
    PART, MEAN, VAR, GAMMA, BETA, COPY, R, SCALE, SHIFT, parts, m, part_rows, start, K, C,
    EPS: tl.constexpr, MERGE: tl.constexpr, HAS_GAMMA: tl.constexpr, HAS_BETA: tl.constexpr, BATCH: tl.constexpr,
    BP: tl.constexpr, BC: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """``r = 1 / sqrt(var + eps)``, ``scale = gamma r``, ``shift = beta - mean scale`` of C channels.

    With MERGE, first mean and variance of K channels from ``start`` on, out of PART (parts, 2, K), those of every
    ``part_rows`` of m rows, by Chan, Golub and LeVeque's formula; the others are in MEAN and VAR. Without BATCH the
    mean is copied too.
    """
    cs = tl.program_id(0) * BC + tl.arange(0, BC)
    cmask = cs < C
    new = (cs >= start) & (cs < start + K)
    mean = tl.load(MEAN + cs, mask=cmask & ~(new & MERGE), other=0.0).to(ACC)
    var = tl.load(VAR + cs, mask=cmask & ~(new & MERGE), other=0.0).to(ACC)
    if MERGE:
        if (tl.program_id(0) * BC + BC > start) & (tl.program_id(0) * BC < start + K):
            ps = tl.arange(0, BP)
            merged = tl.zeros((BC,), dtype=ACC)
            for p in range(0, parts, BP):
                ok = (p + ps < parts)[:, None] & new[None, :]
                at = PART + (p + ps)[:, None].to(tl.int64) * 2 * K + (cs - start)[None, :]
                count = tl.minimum(m - (p + ps) * part_rows, part_rows).to(ACC)[:, None]
                merged += tl.sum(tl.where(ok, tl.load(at, mask=ok, other=0.0) * count, 0.0), axis=0)
            merged = merged / m
            m2 = tl.zeros((BC,), dtype=ACC)
            for p in range(0, parts, BP):
                ok = (p + ps < parts)[:, None] & new[None, :]
                at = PART + (p + ps)[:, None].to(tl.int64) * 2 * K + (cs - start)[None, :]
                count = tl.minimum(m - (p + ps) * part_rows, part_rows).to(ACC)[:, None]
                d = tl.load(at, mask=ok, other=0.0) - merged[None, :]
                m2 += tl.sum(tl.where(ok, (tl.load(at + K, mask=ok, other=0.0) + d * d) * count, 0.0), axis=0)
            mean = tl.where(new, merged, mean)
            var = tl.where(new, m2 / m, var)
            tl.store(MEAN + cs, mean, mask=new)
            tl.store(VAR + cs, var, mask=new)
    r = tl.rsqrt(var + EPS)
    scale = r
    if HAS_GAMMA:
        scale = tl.load(GAMMA + cs, mask=cmask, other=0.0).to(ACC) * r
    shift = -mean * scale
    if HAS_BETA:
        shift += tl.load(BETA + cs, mask=cmask, other=0.0).to(ACC)
    if not BATCH:
        tl.store(COPY + cs, mean, mask=cmask)
    tl.store(R + cs, r, mask=cmask)
    tl.store(SCALE + cs, scale, mask=cmask)
    tl.store(SHIFT + cs, shift, mask=cmask)


@triton.jit
def _finish_gradient(
    pid, SUMS, R, SCALE, DGAMMA, DBETA, SLOPE, LEVEL, DW, OUT, DBIAS, parts, C, count, splits, O, CW, so, st, sc,
    TAPS: tl.constexpr, NORM: tl.constexpr, BATCH: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
    BP: tl.constexpr, BV: tl.constexpr, BS: tl.constexpr, BE: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    vectors = 0
    if NORM:
        vectors = tl.cdiv(C, BV)
        if pid < vectors:
            cs = pid * BV + tl.arange(0, BV)
            cmask = cs < C
            ps = tl.arange(0, BP)
            dbeta = tl.zeros((BV,), dtype=ACC)
            dgamma = tl.zeros((BV,), dtype=ACC)
            for p in range(0, parts, BP):
                ok = (p + ps < parts)[:, None] & cmask[None, :]
                at = SUMS + (p + ps)[:, None].to(tl.int64) * 2 * C + cs[None, :]
                dbeta += tl.sum(tl.load(at, mask=ok, other=0.0), axis=0)
                dgamma += tl.sum(tl.load(at + C, mask=ok, other=0.0), axis=0)
            r = tl.load(R + cs, mask=cmask, other=0.0)
            dgamma = dgamma * r
            tl.store(DBETA + cs, rounded(dbeta, DBETA.dtype.element_ty), mask=cmask)
            tl.store(DGAMMA + cs, rounded(dgamma, DGAMMA.dtype.element_ty), mask=cmask)
            if BATCH:
                scale = tl.load(SCALE + cs, mask=cmask, other=0.0)
                slope = tl.load(SLOPE + cs, mask=cmask, other=0.0) - r * scale * dgamma / count
                level = tl.load(LEVEL + cs, mask=cmask, other=0.0) - scale * dbeta / count
                tl.store(SLOPE + cs, slope, mask=cmask)
                tl.store(LEVEL + cs, level, mask=cmask)
    if WEIGHT or BIAS:
        if pid >= vectors:
            size = O * TAPS * CW * WEIGHT
            width = size + O * BIAS
            es = (pid - vectors) * BE + tl.arange(0, BE)
            ss = tl.arange(0, BS)
            total = tl.zeros((BE,), dtype=ACC)
            for p in range(0, splits, BS):
                ok = (p + ss < splits)[:, None] & (es < width)[None, :]
                at = DW + (p + ss)[:, None].to(tl.int64) * width + es[None, :]
                total += tl.sum(tl.load(at, mask=ok, other=0.0), axis=0)
            if WEIGHT:
                to = es // (TAPS * CW) * so + es // CW % TAPS * st + es % CW * sc
                tl.store(OUT + to, rounded(total, OUT.dtype.element_ty), mask=es < size)
            if BIAS:
                tl.store(DBIAS + es - size, rounded(total, DBIAS.dtype.element_ty), mask=(es >= size) & (es < width))


@kernel
def finish_gradient(
    SUMS, R, SCALE, DGAMMA, DBETA, SLOPE, LEVEL, DW, OUT, DBIAS, parts, C, count, splits, O, CW, so, st, sc,
    TAPS: tl.constexpr, NORM: tl.constexpr, BATCH: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
    BP: tl.constexpr, BV: tl.constexpr, BS: tl.constexpr, BE: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Second stage of a layer's sums; the first programs do the norm's, the others the convolution's.

    NORM: ``dbeta = Σ dz``, ``dgamma = r Σ dz (x - mean)`` of C channels from SUMS (parts, 2, C); with BATCH,
    ``slope -= r scale dgamma / count``, ``level -= scale dbeta / count``.
    WEIGHT: ``out[o, tap, c] = Σ DW`` from (splits, O TAPS CW), ``out`` with strides so, st, sc. BIAS: the O behind.
    """
    _finish_gradient(
        tl.program_id(0), SUMS, R, SCALE, DGAMMA, DBETA, SLOPE, LEVEL, DW, OUT, DBIAS, parts, C, count, splits, O, CW, so,
        st, sc, TAPS, NORM, BATCH, WEIGHT, BIAS, BP, BV, BS, BE, ACC,
    )  # fmt: skip


@kernel
def finish_and_product(
    SUMS, R, SCALE, DGAMMA, DBETA, SLOPE, LEVEL, DW, OUT, DBIAS, parts, C, count, splits, O, CW, so, st, sc,
    programs, X, ldx, XSCALE, XSHIFT, W, ldw, XBIAS, Y, ldy, PART, m, XC, N, D, H, L,
    TAPS: tl.constexpr, NORM: tl.constexpr, BATCH: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
    BP: tl.constexpr, BV: tl.constexpr, BS: tl.constexpr, BE: tl.constexpr,
    PD: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, BIASED: tl.constexpr, STATS: tl.constexpr,
    VX: tl.constexpr, VS: tl.constexpr, VW: tl.constexpr, VO: tl.constexpr,
    BM: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr, ACC: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """:func:`finish_gradient` by the first ``programs``, and by the others a :func:`norm_relu_product` apart from it."""
    pid = tl.program_id(0)
    if pid < programs:
        _finish_gradient(
            pid, SUMS, R, SCALE, DGAMMA, DBETA, SLOPE, LEVEL, DW, OUT, DBIAS, parts, C, count, splits, O, CW, so, st, sc,
            TAPS, NORM, BATCH, WEIGHT, BIAS, BP, BV, BS, BE, ACC,
        )  # fmt: skip
    else:
        _norm_relu_product(
            pid - programs, X, ldx, XSCALE, XSHIFT, W, ldw, XBIAS, Y, ldy, PART, m, XC, N, D, H, L, PD, PH, PW, BIASED,
            STATS, VX, VS, VW, VO, BM, BC, BK, ACC, PREC,
        )  # fmt: skip
