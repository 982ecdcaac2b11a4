//! Finding the pages a guest has written, without any help from its VMM.
//!
//! In a private mapping of an image, a page that was written is anonymous; every other is the image's own, in the host's page
//! cache. So a page is dirty if it is present and not a file's, or if it is in swap: only what was written is ever swapped out.
//! (A page that is being moved in memory shows as swapped, too; one of a file's then still says so.)

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use serde::Serialize;
use zerocopy::IntoBytes;

use super::maps::Backing;
use super::sys::{self, PageRegion};

/// How dirty pages are found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Method {
    /// The `PAGEMAP_SCAN` ioctl, since Linux 6.7: the kernel skips what is not there.
    PagemapScan,
    /// Reading a word for each page from `/proc/<pid>/pagemap`.
    Pagemap,
}

/// Bits of a word of pagemap (`Documentation/admin-guide/mm/pagemap.rst`).
const WORD_FILE_OR_SHARED: u64 = 1 << 61;
const WORD_SWAPPED: u64 = 1 << 62;
const WORD_PRESENT: u64 = 1 << 63;
/// Words read at once.
const WORDS: usize = 8192;

/// Finds dirty pages in one process. Clones share the open file.
#[derive(Clone)]
pub struct Scanner {
    pagemap: Arc<File>,
    page_size: u64,
    wanted: sys::Categories,
    method: Method,
    regions: Vec<PageRegion>,
    words: Vec<u64>,
}

impl Scanner {
    /// Takes `/proc/<pid>/pagemap`. Without a method given, the fastest one the kernel has.
    pub fn new(pagemap: Arc<File>, page_size: u64, backing: Backing, method: Option<Method>) -> Self {
        let zero = match backing {
            // Read but never written: as good as not there.
            Backing::Anonymous => sys::PAGE_IS_PFNZERO,
            // Found only after same-page merging, in place of a written page.
            Backing::File => 0,
        };
        let wanted =
            sys::Categories { none_of: sys::PAGE_IS_FILE | zero, any_of: sys::PAGE_IS_PRESENT | sys::PAGE_IS_SWAPPED };
        let method = method.unwrap_or_else(|| match sys::pagemap_scan(&pagemap, 0, 0, 1, wanted, &mut []) {
            Ok(_) => Method::PagemapScan,
            Err(_) => Method::Pagemap,
        });
        let regions = match method {
            Method::PagemapScan => vec![PageRegion::default(); sys::MAX_IOVECS],
            Method::Pagemap => Vec::new(),
        };
        let words = match method {
            Method::PagemapScan => Vec::new(),
            Method::Pagemap => vec![0; WORDS],
        };
        Self { pagemap, page_size, wanted, method, regions, words }
    }

    /// The method in use.
    pub fn method(&self) -> Method {
        self.method
    }

    /// Appends to `dirty` the dirty ranges from `range.start` on, in order, until `range.end` or until about `max_pages` were
    /// found. Gives the address up to which everything is known, always beyond `range.start`.
    ///
    /// # Errors
    /// The kernel's.
    pub fn next(&mut self, range: Range<u64>, max_pages: u64, dirty: &mut Vec<Range<u64>>) -> io::Result<u64> {
        let end = match self.method {
            Method::PagemapScan => self.scan(range.clone(), max_pages, dirty)?,
            Method::Pagemap => self.read_words(range.clone(), dirty)?,
        };
        match end > range.start && end <= range.end {
            true => Ok(end),
            false => Err(io::Error::other(format!("pagemap stopped at {end:#x} in {range:#x?}"))),
        }
    }

    fn scan(&mut self, range: Range<u64>, max_pages: u64, dirty: &mut Vec<Range<u64>>) -> io::Result<u64> {
        let Self { pagemap, wanted, regions, .. } = self;
        let (found, end) = sys::pagemap_scan(pagemap, range.start, range.end, max_pages, *wanted, regions)?;
        for region in &regions[..found] {
            push(dirty, region.start..region.end);
        }
        Ok(end)
    }

    fn read_words(&mut self, range: Range<u64>, dirty: &mut Vec<Range<u64>>) -> io::Result<u64> {
        let pages = ((range.end - range.start) / self.page_size).min(WORDS as u64);
        let words = &mut self.words[..pages as usize];
        let place = range.start / self.page_size * size_of::<u64>() as u64;
        self.pagemap.read_exact_at(words.as_mut_bytes(), place)?;
        let mut at = range.start;
        for word in words {
            if *word & (WORD_PRESENT | WORD_SWAPPED) != 0 && *word & WORD_FILE_OR_SHARED == 0 {
                push(dirty, at..at + self.page_size);
            }
            at += self.page_size;
        }
        Ok(at)
    }
}

fn push(ranges: &mut Vec<Range<u64>>, next: Range<u64>) {
    match ranges.last_mut() {
        Some(last) if last.end == next.start => last.end = next.end,
        _ => ranges.push(next),
    }
}
