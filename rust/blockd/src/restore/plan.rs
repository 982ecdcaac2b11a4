//! What is to be written where, in batches.

use std::collections::VecDeque;

use overlaybd::{Place, Segment, Stack, SECTOR};

use crate::capture::sys::MAX_IOVECS;
use crate::capture::Mapping;

/// Bytes of the image that are looked up at a time: bounds what layers of many small extents take.
const STRIPE: u64 = 16 << 20;

/// A run of bytes, whole sectors, that some layer holds in one place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// Where it goes in the process.
    pub address: u64,
    /// Bytes.
    pub len: u64,
    /// Where it is: data, or zeroes.
    pub place: Place,
}

impl Piece {
    /// Cuts off at most `len` bytes, whole sectors, from the front.
    fn take(&mut self, len: u64) -> Self {
        let taken = Self { len: len.min(self.len), ..*self };
        self.address += taken.len;
        self.len -= taken.len;
        if let Place::Data { sector, .. } = &mut self.place {
            *sector += taken.len / SECTOR;
        }
        taken
    }

    /// Whether the bytes of `next` can be had together with these, which they follow.
    pub fn joins(&self, next: &Self) -> bool {
        match (self.place, next.place) {
            (Place::Data { layer: a, sector: x }, Place::Data { layer: b, sector: y }) => {
                a == b && x + self.len / SECTOR == y
            }
            (a, b) => a == b,
        }
    }
}

/// Walks guest RAM and finds what the layers hold.
pub struct Plan<'a> {
    stack: &'a Stack,
    /// What has not been looked at.
    left: VecDeque<Mapping>,
    segments: Vec<Segment>,
    found: VecDeque<Piece>,
}

impl<'a> Plan<'a> {
    pub fn new(stack: &'a Stack, mappings: &[Mapping]) -> Self {
        let left = mappings.iter().copied().collect();
        Self { stack, left, segments: Vec::new(), found: VecDeque::new() }
    }

    /// Takes the next pieces, together at most `bytes` (whole sectors) and no more than one system call writes; none at the end.
    /// Gives whether more may follow.
    pub fn next(&mut self, bytes: u64, pieces: &mut Vec<Piece>) -> bool {
        pieces.clear();
        let mut room = bytes;
        while room > 0 && pieces.len() < MAX_IOVECS {
            let Some(piece) = self.found.front_mut() else {
                match self.look_up() {
                    true => continue,
                    false => return false,
                }
            };
            let taken = piece.take(room);
            if piece.len == 0 {
                self.found.pop_front();
            }
            room -= taken.len;
            pieces.push(taken);
        }
        !self.found.is_empty() || !self.left.is_empty()
    }

    /// Leaves nothing to take.
    pub fn clear(&mut self) {
        self.left.clear();
        self.found.clear();
    }

    /// Looks up the next stripe, if there is one.
    fn look_up(&mut self) -> bool {
        let Some(mapping) = self.left.pop_front() else { return false };
        let length = mapping.length.min(STRIPE);
        if length < mapping.length {
            self.left.push_front(mapping.without(length));
        }
        self.segments.clear();
        self.stack.resolve(mapping.offset / SECTOR, (mapping.offset + length) / SECTOR, &mut self.segments);
        let held = self.segments.iter().filter(|segment| segment.place != Place::Hole);
        self.found.extend(held.map(|segment| Piece {
            address: mapping.address + (segment.offset * SECTOR - mapping.offset),
            len: segment.len * SECTOR,
            place: segment.place,
        }));
        true
    }
}

/// The first byte at or after `start` and before `end` that the layers hold. Both are whole sectors.
pub fn first_held(stack: &Stack, start: u64, end: u64) -> Option<u64> {
    let mut segments = Vec::new();
    let mut at = start;
    while at < end {
        let next = end.min(at + STRIPE);
        segments.clear();
        stack.resolve(at / SECTOR, next / SECTOR, &mut segments);
        if let Some(held) = segments.iter().find(|segment| segment.place != Place::Hole) {
            return Some(held.offset * SECTOR);
        }
        at = next;
    }
    None
}
