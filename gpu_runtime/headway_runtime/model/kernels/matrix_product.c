/* Products of a few to some thousand rows with weights that never change: float32 y = x · weightᵀ + bias.
 *
 * The weights lie in the order in which they are read: `depth` inputs of PANEL outputs at a time, (in / depth, out / PANEL, depth, PANEL).
 * A panel of them stays in the first-level cache while one block of rows after another, ROWS at a time, is multiplied with it in
 * registers (Goto and van de Geijn, Anatomy of High-Performance Matrix Multiplication, 2008); meanwhile the next panel is fetched from
 * memory, a cache line every few steps, so that few rows wait for little more than memory and many rows for nothing but arithmetic.
 *
 * Each output is summed up in the same order whatever rows are computed beside it, so a row's result does not depend on its batch.
 */

#include "tile.h"

#define BLOCK 96 /* rows whose inputs of one depth stay in the second-level cache: 108 KiB */

const long panel = PANEL;

/* At most BLOCK rows with the panels [first, last). */
static void block(const float *x, long rows, long in, const float *weights, const float *bias, long out, float *y, long depth, long first,
	long last)
{
	long panels = parts(out, PANEL), whole = out / PANEL, count = parts(rows, ROWS);
	float rest[BLOCK * PANEL]; /* of the last panel, when the outputs do not fill it */
	for (long done = 0; done < in; done += depth) {
		/* Up to three rows are done when half a panel is there, the other half comes by the processor's own prefetching. */
		long now = least(depth, in - done), lines = parts(now * PANEL / LINE, rows < 4 ? 2 : count);
		for (long j = first; j < last; j++) {
			const float *from = weights + done * panels * PANEL + j * now * PANEL, *next = from + now * PANEL;
			float *to = j < whole ? y + j * PANEL : rest;
			long step = j < whole ? out : PANEL;
			for (long i = 0, row = 0; i < count; i++) {
				long many = rows / count + (i < rows % count);
				const float *start = done ? to + row * step : bias + j * PANEL;
				tiles[many](x + row * in + done, in, from, PANEL, now, start, done ? step : 0, to + row * step, step, next + i * lines * LINE,
					lines);
				row += many;
			}
		}
	}
	if (last > whole)
		for (long row = 0; row < rows; row++)
			for (long column = whole * PANEL; column < out; column++)
				y[row * out + column] = rest[row * PANEL + column - whole * PANEL];
}

/* x (rows, in), weights as above, bias (out, padded to a panel) → y (rows, out), in `threads` parts of the outputs. */
void product(const float *x, long rows, long in, const float *weights, const float *bias, long out, float *y, long depth, long threads)
{
	long panels = parts(out, PANEL);
#pragma omp parallel for num_threads(threads) schedule(static, 1) if (threads > 1)
	for (long part = 0; part < threads; part++)
		for (long row = 0, count; row < rows; row += count) {
			count = parts(rows - row, parts(rows - row, BLOCK));
			count = least(parts(count, ROWS) * ROWS, rows - row);
			block(x + row * in, count, in, weights, bias, out, y + row * out, depth, panels * part / threads, panels * (part + 1) / threads);
		}
}
