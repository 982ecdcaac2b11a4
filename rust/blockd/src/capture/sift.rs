//! Deciding what of a batch must be written.

use overlaybd::ReadError;

use super::base::{Holds, View};
use super::plan::Run;

/// What became of the pages looked at. Each is counted once.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Written, with their bytes.
    pub data: u64,
    /// All zeroes, and recorded as such because the base holds something there.
    pub zeroed: u64,
    /// All zeroes, as in the base: dropped.
    pub zero: u64,
    /// As in the base: dropped.
    pub equal: u64,
}

impl Counts {
    /// Adds those of another batch.
    pub fn add(&mut self, other: Self) {
        self.data += other.data;
        self.zeroed += other.zeroed;
        self.zero += other.zero;
        self.equal += other.equal;
    }
}

/// What is to be written of a batch: (offset in the image, bytes).
#[derive(Debug, Default)]
pub struct Sifted {
    /// Ranges with data, which follow one another from the start of the batch's buffer.
    pub data: Vec<(u64, u64)>,
    /// Ranges that read as zeroes.
    pub zeroes: Vec<(u64, u64)>,
    /// How it came out.
    pub counts: Counts,
}

/// Pages in a row that are not as in the base, after which it is no longer looked at for each.
const ENOUGH: usize = 256;
/// One page of so many is then compared.
const SAMPLE: usize = 16;

/// Which pages are compared with what the base stores: all, until many in a row were not as there; then some, until one is.
/// What a guest wrote anew, mostly whole regions, so costs no reading of the base; as many pages stored a second time as are
/// passed over before a sample is as in the base (some 16 each time) are the price.
#[derive(Default)]
struct Attention {
    /// Compared in a row, and not as in the base.
    unlike: usize,
    /// Pages since the last sample, that one included.
    passed: usize,
}

impl Attention {
    /// How many of the next `most` pages are to be treated alike, and whether to compare them.
    fn next(&self, most: usize) -> (usize, bool) {
        match (self.unlike < ENOUGH, self.passed) {
            (true, _) => (most.min(ENOUGH - self.unlike), true),
            (false, 0) => (1, true),
            (false, passed) => (most.min(SAMPLE - passed), false),
        }
    }

    /// Takes note of a page.
    fn seen(&mut self, compared: bool, fate: &Fate) {
        self.passed = if self.unlike < ENOUGH { 0 } else { (self.passed + 1) % SAMPLE };
        self.unlike = match (compared, fate) {
            (false, _) => self.unlike,
            (true, Fate::Data | Fate::Zero) => self.unlike + 1,
            (true, _) => 0,
        };
    }
}

/// Goes through the pages of a batch and drops those that need not be written.
pub struct Sieve<'a> {
    view: &'a View,
    page_size: usize,
    /// Whether pages are compared with what the base stores.
    compare: bool,
    attention: Attention,
    base: Vec<u8>,
    holds: Vec<(u64, u64, Holds)>,
}

impl<'a> Sieve<'a> {
    pub fn new(view: &'a View, page_size: u64, compare: bool) -> Self {
        Self {
            view,
            page_size: page_size as usize,
            compare,
            attention: Attention::default(),
            base: Vec::new(),
            holds: Vec::new(),
        }
    }

    /// Takes runs whose bytes follow one another in `buf`, and moves those to be written to its front.
    pub fn sift(&mut self, runs: &[Run], buf: &mut [u8], out: &mut Sifted) -> Result<(), ReadError> {
        out.data.clear();
        out.zeroes.clear();
        out.counts = Counts::default();
        // Bytes looked at, and of them kept.
        let (mut at, mut kept) = (0, 0);
        for run in runs {
            let mut holds = std::mem::take(&mut self.holds);
            self.view.holds(run.offset, run.offset + run.len, self.page_size as u64, &mut holds);
            let mut rest = holds.iter().copied();
            let mut next = rest.next();
            while let Some((start, end, holds)) = next {
                let most = (end - start) as usize / self.page_size;
                let (pages, compared) = match holds {
                    Holds::Data if self.compare => self.attention.next(most),
                    _ => (most, false),
                };
                let len = pages * self.page_size;
                if compared {
                    self.base.resize(self.base.len().max(len), 0);
                    self.view.read(&mut self.base[..len], start)?;
                }
                for page in (0..len).step_by(self.page_size) {
                    let offset = start + page as u64;
                    let here = at..at + self.page_size;
                    let base = compared.then(|| &self.base[page..page + self.page_size]);
                    let fate = fate(&buf[here.clone()], holds, base);
                    if holds == Holds::Data {
                        self.attention.seen(compared, &fate);
                    }
                    match fate {
                        Fate::Data => {
                            out.counts.data += 1;
                            push(&mut out.data, offset, self.page_size);
                            if at != kept {
                                buf.copy_within(here, kept);
                            }
                            kept += self.page_size;
                        }
                        Fate::Zero => {
                            out.counts.zeroed += 1;
                            push(&mut out.zeroes, offset, self.page_size);
                        }
                        Fate::SameZero => out.counts.zero += 1,
                        Fate::Same => out.counts.equal += 1,
                    }
                    at += self.page_size;
                }
                next = match start + len as u64 {
                    reached if reached < end => Some((reached, end, holds)),
                    _ => rest.next(),
                };
            }
            self.holds = holds;
        }
        Ok(())
    }
}

enum Fate {
    Data,
    Zero,
    SameZero,
    Same,
}

fn fate(page: &[u8], holds: Holds, base: Option<&[u8]>) -> Fate {
    match (is_zero(page), holds) {
        (true, Holds::Zeroes) => Fate::SameZero,
        (true, _) if base.is_some_and(is_zero) => Fate::SameZero,
        (true, _) => Fate::Zero,
        (false, _) if base == Some(page) => Fate::Same,
        (false, _) => Fate::Data,
    }
}

/// Whether all bytes are zero. Blocks are folded without a branch, which compiles to vector instructions; most pages that are
/// not zero show it in the first.
fn is_zero(bytes: &[u8]) -> bool {
    let (blocks, rest) = (bytes.chunks_exact(128), bytes.chunks_exact(128).remainder());
    let fold = |block: &[u8]| block.iter().fold(0, |all, &byte| all | byte) == 0;
    blocks.into_iter().all(fold) && fold(rest)
}

fn push(ranges: &mut Vec<(u64, u64)>, offset: u64, len: usize) {
    match ranges.last_mut() {
        Some((start, length)) if *start + *length == offset => *length += len as u64,
        _ => ranges.push((offset, len as u64)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_single_bit_anywhere_is_seen() {
        let mut page = vec![0u8; 4096 + 77];
        assert!(is_zero(&page) && is_zero(&[]));
        for at in [0, 1, 127, 128, 2047, 4095, 4096, 4172] {
            page[at] = 0x80;
            assert!(!is_zero(&page), "{at}");
            page[at] = 0;
        }
    }

    /// Which of `pages` pages are compared, if those that `like` tells are as in the base.
    fn compared(pages: usize, like: impl Fn(usize) -> bool) -> Vec<usize> {
        let (mut attention, mut at, mut all) = (Attention::default(), 0, Vec::new());
        while at < pages {
            let (taken, compared) = attention.next(pages - at);
            assert!((1..=pages - at).contains(&taken));
            for page in at..at + taken {
                attention.seen(compared, if compared && like(page) { &Fate::Same } else { &Fate::Data });
                all.extend(compared.then_some(page));
            }
            at += taken;
        }
        all
    }

    #[test]
    fn few_pages_are_compared_where_none_is_as_in_the_base() {
        assert_eq!(compared(5000, |_| true).len(), 5000);
        assert_eq!(compared(5000, |page| page % ENOUGH == 0).len(), 5000);
        assert_eq!(compared(ENOUGH, |_| false).len(), ENOUGH);
        assert_eq!(compared(ENOUGH + 10 * SAMPLE, |_| false).len(), ENOUGH + 10);
        // What begins to be as in the base is noticed at the next sample, and all is compared again.
        let from = 3 * ENOUGH + 5;
        let late = compared(8 * ENOUGH, |page| page >= from);
        assert!(8 * ENOUGH - from - late.iter().filter(|page| **page >= from).count() < SAMPLE);
    }

    #[test]
    fn neighbours_are_joined() {
        let mut ranges = Vec::new();
        for offset in [0, 4096, 12288, 16384, 8192] {
            push(&mut ranges, offset, 4096);
        }
        assert_eq!(ranges, [(0, 8192), (12288, 8192), (8192, 4096)]);
    }
}
