//! CRC-32C as ZFile uses it: the bare polynomial register.
//!
//! overlaybd (`src/overlaybd/zfile/crc32/crc32c.cpp`) feeds the register without the usual inversion
//! before and after, so its values differ from iSCSI's CRC-32C; `crc32c::crc32c_append` inverts on both
//! sides, which is undone here.

/// Seed of the checksum that follows each compressed block (`NOI_WELL_KNOWN_PRIME` in `zfile.cpp`).
pub const BLOCK_SEED: u32 = 100_007;

/// Runs `data` through the register that starts as `seed`.
pub fn crc32c(seed: u32, data: &[u8]) -> u32 {
    !crc32c::crc32c_append(!seed, data)
}

#[cfg(test)]
mod tests {
    use super::crc32c;

    /// The register, one bit at a time, straight from the definition (reflected 0x1EDC6F41).
    fn bitwise(mut register: u32, data: &[u8]) -> u32 {
        for byte in data {
            register ^= u32::from(*byte);
            for _ in 0..8 {
                register = (register >> 1) ^ (0x82F6_3B78 & (register & 1).wrapping_neg());
            }
        }
        register
    }

    #[test]
    fn matches_the_definition() {
        let data: Vec<u8> = (0..1000u32).map(|i| (i * 7 + 3) as u8).collect();
        for seed in [0, 1, super::BLOCK_SEED, u32::MAX] {
            for len in [0, 1, 7, 8, 512, 1000] {
                assert_eq!(crc32c(seed, &data[..len]), bitwise(seed, &data[..len]));
            }
        }
        // The published check value of CRC-32C, which is inverted on both sides.
        assert_eq!(!crc32c(u32::MAX, b"123456789"), 0xE306_9283);
    }
}
