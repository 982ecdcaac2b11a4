//! ZFiles put together byte by byte from `docs/formats/overlaybd.md`, not with this crate's own code.

#![allow(clippy::expect_used)]

mod common;

use std::io::Write;
use std::sync::Arc;

use common::pattern;
use overlaybd::zfile::{Algorithm, OpenZFileError, ZFile, ZFileOptions, ZFileWriter};
use overlaybd::{ByteSource, MemorySource};

/// The bare CRC-32C register, bit by bit.
fn crc(mut register: u32, data: &[u8]) -> u32 {
    for byte in data {
        register ^= u32::from(*byte);
        for _ in 0..8 {
            register = (register >> 1) ^ (0x82F6_3B78 & (register & 1).wrapping_neg());
        }
    }
    register
}

struct Fields {
    flags: u64,
    index_offset: u64,
    index_size: u64,
    original_size: u64,
    index_crc: u32,
    block_size: u32,
    algorithm: u8,
    verify: u8,
}

/// Section "ZFile header and trailer".
fn header(f: &Fields) -> Vec<u8> {
    let mut block = Vec::new();
    block.extend_from_slice(b"ZFile\x00\x01\x00");
    block.extend_from_slice(&[0x74, 0x75, 0x6A, 0x69, 0x2E, 0x79, 0x79, 0x66]);
    block.extend_from_slice(&[0x40, 0x41, 0x6C, 0x69, 0x62, 0x61, 0x62, 0x61]);
    block.extend_from_slice(&96u32.to_le_bytes());
    block.extend_from_slice(&0u32.to_le_bytes());
    for field in [f.flags, f.index_offset, f.index_size, f.original_size] {
        block.extend_from_slice(&field.to_le_bytes());
    }
    block.extend_from_slice(&f.index_crc.to_le_bytes());
    block.extend_from_slice(&0u32.to_le_bytes());
    block.extend_from_slice(&f.block_size.to_le_bytes());
    block.extend_from_slice(&[f.algorithm, 0, 0, 0]);
    block.extend_from_slice(&[0; 8]);
    block.push(f.verify);
    block.resize(512, 0);
    if f.flags & 0b1_0000 != 0 {
        let digest = crc(0, &block);
        block[28..32].copy_from_slice(&digest.to_le_bytes());
    }
    block
}

/// An LZ4 block of literals only.
fn lz4_literals(data: &[u8]) -> Vec<u8> {
    assert!(data.len() >= 15);
    let mut block = vec![0xF0];
    let mut rest = data.len() - 15;
    while rest >= 255 {
        block.push(255);
        rest -= 255;
    }
    block.push(rest as u8);
    block.extend_from_slice(data);
    block
}

/// An LZ4 block that says one byte and repeats it: a literal, a match of `len - 6` at distance 1, 5 literals.
fn lz4_run(byte: u8, len: usize) -> Vec<u8> {
    let mut block = vec![0x1F, byte, 1, 0];
    let mut rest = len - 6 - 19;
    while rest >= 255 {
        block.push(255);
        rest -= 255;
    }
    block.push(rest as u8);
    block.push(0x50);
    block.extend_from_slice(&[byte; 5]);
    block
}

/// A zstd frame of one block that repeats a byte (RFC 8878: single segment, two bytes of content size).
fn zstd_run(byte: u8, len: usize) -> Vec<u8> {
    let mut frame = vec![0x28, 0xB5, 0x2F, 0xFD, 0x60];
    frame.extend_from_slice(&((len - 256) as u16).to_le_bytes());
    frame.extend_from_slice(&(1 | 1 << 1 | (len as u32) << 3).to_le_bytes()[..3]);
    frame.push(byte);
    frame
}

/// A zstd frame of one raw block.
fn zstd_raw(data: &[u8]) -> Vec<u8> {
    let mut frame = vec![0x28, 0xB5, 0x2F, 0xFD, 0x60];
    frame.extend_from_slice(&((data.len() - 256) as u16).to_le_bytes());
    frame.extend_from_slice(&(1 | (data.len() as u32) << 3).to_le_bytes()[..3]);
    frame.extend_from_slice(data);
    frame
}

const BLOCK: usize = 4096;

fn plain() -> Vec<u8> {
    [pattern(1, BLOCK), vec![7; BLOCK], pattern(2, 1000)].concat()
}

fn blocks(algorithm: u8) -> Vec<Vec<u8>> {
    let plain = plain();
    match algorithm {
        1 => vec![lz4_literals(&plain[..BLOCK]), lz4_run(7, BLOCK), lz4_literals(&plain[2 * BLOCK..])],
        _ => vec![zstd_raw(&plain[..BLOCK]), zstd_run(7, BLOCK), zstd_raw(&plain[2 * BLOCK..])],
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Variant {
    /// What overlaybd writes by default now.
    Trailer,
    /// The header is written again at the end.
    HeaderOverwritten,
    /// Before the digest was introduced.
    NoDigest,
    /// With the jump table compressed.
    CompressedIndex,
}

fn zfile(algorithm: u8, verify: bool, variant: Variant) -> Vec<u8> {
    let mut body = Vec::new();
    let mut index = Vec::new();
    for mut block in blocks(algorithm) {
        if verify {
            let checksum = crc(100_007, &block);
            block.extend_from_slice(&checksum.to_le_bytes());
        }
        index.extend_from_slice(&(block.len() as u32).to_le_bytes());
        body.extend(block);
    }
    let mut index_size = 3;
    let digest = if variant == Variant::NoDigest { 0 } else { 0b1_0000 };
    let mut flags = digest;
    if variant == Variant::CompressedIndex {
        // 12 bytes: a short run of literals, as LZ4 stores what does not repeat.
        index = [vec![0xC0], index].concat();
        index_size = index.len() as u64;
        flags |= 0b10_0000;
    }
    let first = Fields {
        flags: 0b0011 | digest,
        index_offset: 0,
        index_size: 0,
        original_size: 0,
        index_crc: 0,
        block_size: BLOCK as u32,
        algorithm,
        verify: verify.into(),
    };
    let last = Fields {
        flags: 0b0110 | flags,
        index_offset: 512 + body.len() as u64,
        index_size,
        original_size: plain().len() as u64,
        index_crc: if digest == 0 { 0 } else { crc(0, &index) },
        ..first
    };
    let trailer = header(&last);
    let first = match variant {
        Variant::HeaderOverwritten => header(&Fields { flags: 0b1011 | flags, ..last }),
        _ => header(&first),
    };
    [first, body, index, trailer].concat()
}

fn open(bytes: Vec<u8>) -> Result<ZFile, OpenZFileError> {
    ZFile::open(Arc::new(MemorySource::new(bytes)))
}

fn check(zfile: &dyn ByteSource, plain: &[u8]) {
    assert_eq!(zfile.size(), plain.len() as u64);
    let ranges = [(0, plain.len()), (0, 1), (1, 4095), (4095, 2), (4096, 4096), (5000, 4000), (plain.len() - 1, 1)];
    for (offset, len) in ranges {
        let mut bytes = vec![0xEE; len];
        zfile.read_exact_at(&mut bytes, offset as u64).expect("read");
        assert!(bytes == plain[offset..offset + len], "{len} bytes at {offset}");
    }
    assert!(zfile.read_exact_at(&mut [0; 2], plain.len() as u64 - 1).is_err());
    assert!(zfile.read_exact_at(&mut [0; 1], u64::MAX).is_err());
}

#[test]
fn files_as_overlaybd_writes_them_are_read() {
    for algorithm in [1, 2] {
        for verify in [false, true] {
            for variant in [Variant::Trailer, Variant::HeaderOverwritten, Variant::NoDigest] {
                check(&open(zfile(algorithm, verify, variant)).expect("zfile"), &plain());
            }
        }
    }
    check(&open(zfile(1, true, Variant::CompressedIndex)).expect("zfile"), &plain());
}

#[test]
fn damage_is_noticed() {
    let good = zfile(1, true, Variant::Trailer);
    let data = |at: usize| {
        let mut bytes = good.clone();
        bytes[at] ^= 1;
        open(bytes)
    };
    assert!(matches!(data(0), Err(OpenZFileError::Magic)));
    assert!(matches!(data(80), Err(OpenZFileError::Checksum("header"))));
    assert!(matches!(data(good.len() - 512 + 60), Err(OpenZFileError::Checksum("trailer"))));
    assert!(matches!(data(good.len() - 512 - 4), Err(OpenZFileError::Checksum("jump table"))));
    let zfile = data(512 + 100).expect("only a block is damaged");
    let error = zfile.read_exact_at(&mut [0; 10], 0).expect_err("checksum");
    assert_eq!(error.kind(), std::io::ErrorKind::InvalidData);
    assert!(zfile.read_exact_at(&mut [0; 10], 4096).is_ok(), "other blocks are still good");
    assert!(open(good[..good.len() - 1].to_vec()).is_err());
    assert!(open(good[..700].to_vec()).is_err());
}

/// LZ4's block format, decoded the slow way.
fn lz4_decode(block: &[u8]) -> Vec<u8> {
    let (mut at, mut out) = (0, Vec::new());
    let length = |at: &mut usize, nibble: u8| {
        let mut len = usize::from(nibble);
        if nibble == 15 {
            loop {
                len += usize::from(block[*at]);
                *at += 1;
                if block[*at - 1] != 255 {
                    break;
                }
            }
        }
        len
    };
    while at < block.len() {
        let token = block[at];
        at += 1;
        let literals = length(&mut at, token >> 4);
        out.extend_from_slice(&block[at..at + literals]);
        at += literals;
        if at == block.len() {
            break;
        }
        let distance = usize::from(block[at]) | usize::from(block[at + 1]) << 8;
        at += 2;
        for _ in 0..length(&mut at, token & 15) + 4 {
            out.push(out[out.len() - distance]);
        }
    }
    out
}

#[test]
fn what_is_written_is_the_format() {
    let plain = [plain(), vec![0; 30_000]].concat();
    let options = ZFileOptions { algorithm: Algorithm::Lz4, block_size: BLOCK as u32, verify: true };
    let mut writer = ZFileWriter::new(Vec::new(), options).expect("header");
    // In uneven pieces.
    plain.chunks(777).for_each(|piece| writer.write_all(piece).expect("write"));
    let bytes = writer.finish().expect("finish");

    let count = plain.len().div_ceil(BLOCK);
    let index_at = bytes.len() - 512 - 4 * count;
    let index = &bytes[index_at..bytes.len() - 512];
    let first = Fields {
        flags: 0b1_0011,
        index_offset: 0,
        index_size: 0,
        original_size: 0,
        index_crc: 0,
        block_size: BLOCK as u32,
        algorithm: 1,
        verify: 1,
    };
    let last = Fields {
        flags: 0b1_0110,
        index_offset: index_at as u64,
        index_size: count as u64,
        original_size: plain.len() as u64,
        index_crc: crc(0, index),
        ..first
    };
    assert!(bytes[..512] == header(&first));
    assert!(bytes[bytes.len() - 512..] == header(&last));
    let mut at = 512;
    for (i, length) in index.chunks_exact(4).enumerate() {
        let length = u32::from_le_bytes(length.try_into().expect("four bytes")) as usize;
        let (block, checksum) = bytes[at..at + length].split_at(length - 4);
        assert_eq!(crc(100_007, block).to_le_bytes(), *checksum);
        assert!(lz4_decode(block) == plain[i * BLOCK..plain.len().min((i + 1) * BLOCK)]);
        at += length;
    }
    assert_eq!(at, index_at);
}

#[test]
fn every_option_reads_back() {
    for algorithm in [Algorithm::Lz4, Algorithm::Zstd] {
        for block_size in [4096, 16384, 65536] {
            for verify in [false, true] {
                let plain = [pattern(9, 200_000), vec![3; 300_000], pattern(10, 77)].concat();
                let options = ZFileOptions { algorithm, block_size, verify };
                let mut writer = ZFileWriter::new(Vec::new(), options).expect("header");
                writer.write_all(&plain).expect("write");
                let bytes = writer.finish().expect("finish");
                assert!(bytes.len() < plain.len());
                check(&open(bytes).expect("zfile"), &plain);
            }
        }
    }
    for block_size in [0, 512, 5000, 131_072] {
        let options = ZFileOptions { block_size, ..ZFileOptions::default() };
        assert!(ZFileWriter::new(Vec::new(), options).is_err());
    }
    let empty = ZFileWriter::new(Vec::new(), ZFileOptions::default()).expect("header").finish().expect("finish");
    assert_eq!(open(empty).expect("empty").size(), 0);
}
